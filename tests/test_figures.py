"""Pictures of runs: thinned curves, little or nothing to draw, rollbacks and phases, own numbers, two sides."""

import math
from typing import Any

import pytest
from matplotlib.figure import Figure

from matrixlib.runs import figures
from matrixlib.runs.figures import draw, frame, loss_groups, png, training_figure

HELD_OUT = {"loss": 2.5, "losses": {"policy": 2.0}, "metrics": {"policy/top1": 0.1}}


def row(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "losses": {"policy": 1.0, "value": 0.5},
        "metrics": {"policy/top1": 0.25, "policy/entropy": 2.0},
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "throughput": 1000.0,
    } | values


def size(figure: Figure, dpi: int = 100) -> tuple[int, int]:
    data = png(figure, dpi)
    assert data.startswith(b"\x89PNG")
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def names(figure: Figure, label: str) -> set[str]:
    """Labels of the lines of one picture."""
    (axes,) = (axes for axes in figure.axes if axes.get_ylabel() == label)
    return {str(line.get_label()) for line in axes.get_lines()}


def test_long_curves_are_drawn_from_means_over_pairs() -> None:
    table = frame(row(step, losses={"policy": float(step)}) for step in range(1, 5002))
    figure = Figure()
    draw(figure, table, "run")
    assert all(len(line.get_xdata()) <= figures.MAX_POINTS for axes in figure.axes for line in axes.get_lines())
    raw = figure.axes[0].get_lines()[0]
    assert (raw.get_xdata() == raw.get_ydata()).all(), "both are averaged alike"


def test_each_number_goes_to_its_picture() -> None:
    later = {"losses": {"policy": 1.5}, "metrics": {"policy/top1": 0.2, "policy/top3": 0.4}, "kind": "full"}
    rows = [row(1, extra={"norm": 3.0}), row(2, validation=later, extra={"norm": 4.0})]
    figure = training_figure(rows)
    assert names(figure, "loss [nat]") == {"policy", "value"} | {"_child0", "_child2"}
    assert names(figure, "accuracy [%]") == {"_child0", "policy/top1", "policy/top3"}, "no entropy, no top5"
    (norm,) = (axes for axes in figure.axes if axes.get_ylabel() == "norm")
    assert norm.get_lines()[0].get_ydata().tolist() == [3.0, 4.0], "a picture of its own"


def test_updates_that_are_not_finite_are_counted_in_the_title() -> None:
    rows = [row(1), row(2, losses={"policy": math.nan}), row(3, grad_norm=math.inf)]
    figure = training_figure(rows, "run")
    assert figure.get_suptitle() == "run - 2 updates not finite"
    labels = {axes.get_ylabel() for axes in figure.axes}
    assert labels == {"loss [nat]", "accuracy [%]", "learning rate", "gradient norm before clipping", "positions/s"}
    assert size(figure, 50) == (500, 280)


def test_a_small_loss_has_an_axis_of_its_own() -> None:
    """On one axis a loss of 0.0001 makes a flat line of all others."""
    losses = {"policy": 2.0, "value": 0.5, "ssl_threat": 1e-4, "ssl_pin": 1.5e-4}
    table = frame([row(step, losses=losses, validation={"loss": 2.5}) for step in range(1, 9)])
    assert loss_groups(table) == [["loss", "policy", "value"], ["ssl_pin", "ssl_threat"]]
    figure = Figure()
    draw(figure, table, "run")
    assert sum(axes.get_ylabel() == "loss [nat]" for axes in figure.axes) == 2
    many = {f"loss{k}": 10.0**-k for k in range(0, 12, 2)}
    assert [len(names) for names in loss_groups(frame([row(1, losses=many)]))] == [1, 1, 4], "three axes at most"


@pytest.mark.parametrize("count", [1, 9, 30])
def test_legends_lie_beside_the_curves_and_leave_room_for_the_title(count: int) -> None:
    values = {f"head{k}": 1.0 for k in range(count)}
    shares = {f"head{k}/accuracy": 0.5 for k in range(count)}
    figure = training_figure(
        [row(1, losses=values, metrics=shares, validation={"losses": values, "metrics": shares})], "run"
    )
    size(figure)
    title = figure.texts[0].get_window_extent().padded(-3)
    legends = [axes for axes in figure.axes if axes.get_legend()]
    assert len(legends) == 2
    for axes in legends:
        box = axes.get_legend().get_window_extent()
        assert not title.overlaps(box)
        assert box.y0 >= axes.get_window_extent().y1 - 2, "beside the curves"


@pytest.mark.parametrize(("first", "last", "title"), [(401, 480, "-60% at 4"), (30, 30, "-60% at 30"), (0, 0, "")])
def test_a_fall_of_the_throughput_is_named_and_warming_up_is_none(first: int, last: int, title: str) -> None:
    steps = range(1, 1001 if last > 100 else 51)
    rows = [row(step, throughput=400.0 if first <= step <= last else 1000.0) for step in steps]
    rows[0]["throughput"] = math.nan
    (speed,) = (axes for axes in training_figure(rows).axes if axes.get_ylabel() == "positions/s")
    assert speed.get_title("left").startswith(f"red: slower than usual, {title}" if title else "")
    assert len(speed.collections) == bool(title)


@pytest.mark.parametrize("rows", [[], [{"step": 1}], [row(1, losses={"policy": 0.0}, grad_norm=0.0)]])
def test_little_or_nothing_to_draw_is_no_error(rows: list[dict[str, Any]]) -> None:
    size(training_figure(rows))


def test_a_rollback_is_drawn_over_and_marked_and_phases_are_marked() -> None:
    rows = [(1, 0, 0, 1.0), (2, 0, 0, 1.0), (3, 0, 1, 90.0), (2, 1, 0, 2.0), (3, 1, 1, 3.0), (4, 1, 1, 4.0)]
    keys = ("step", "rollbacks", "phase", "losses")
    table = frame(dict(zip(keys, (*head, {"policy": loss}), strict=True)) for *head, loss in rows)
    assert table["losses/policy"].to_dict() == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    figure = Figure()
    draw(figure, table, "run")
    assert "rolled back to update 1" in figure.get_suptitle()
    marks = [(line.get_linestyle(), line.get_xdata()[0]) for line in figure.axes[0].get_lines()[-2:]]
    assert marks == [(":", 2), ("--", 3)]

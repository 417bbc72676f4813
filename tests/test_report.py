"""Offline report: whole, escaped, nothing to fetch, and useful after a crash."""

import base64
import json
import math
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import nbformat
import pytest
from bs4 import BeautifulSoup
from matplotlib.figure import Figure

from matrixlib import runs
from matrixlib.engine.metrics import MetricsLog
from matrixlib.files import write_json
from matrixlib.runs import report
from matrixlib.runs.figures import png


class Structure:
    """Headings, text, tags and links of a page, and everything that a browser would fetch."""

    def __init__(self, path: Path) -> None:
        page = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
        self.tags = {tag.name for tag in page.find_all()}
        self.text = " ".join(page.get_text(" ").split())
        self.headings = [tag.get_text() for tag in page.find_all(["h1", "h2"])]
        self.links = [tag["href"] for tag in page.find_all("a")]
        sources = [tag.get(name) for tag in page.find_all() for name in ("src", "srcset", "data", "action")]
        self.fetched = [source for source in sources if source] + [tag["href"] for tag in page.find_all("link")]


def make_run(root: Path, name: str = "quick-1", started: str = "2026-01-01T00:00:00Z") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    summary: dict[str, Any] = {"run": name, "preset": "quick", "complete": True, "steps": 500, "seconds": 200.0}
    summary |= {
        "parameters": 53161185,
        "evaluation": {"top1": 0.271, "baselines": {"best_capture_top1": 0.171}, "bands": [1]},
        "curve": [3.0, 2.0, 1.0],
        "runtime": {"device": "cpu", "dtype": "bf16", "reasons": {"dtype": "measured 1.6 x as fast as fp32"}},
        "verdict": {"passed": True, "demo": False, "checks": [{"name": "ended", "passed": True, "detail": "500"}]},
    }
    write_json(folder / "summary.json", summary)
    write_json(folder / "run.json", {"started": started, "commit": "abc123", "versions": {"torch": "2.13.0"}})
    (folder / "config.yaml").write_text("task: chess\nseed: 0\n")
    with closing(MetricsLog(folder / "metrics.jsonl")) as log:
        for step in range(1, 6):
            log.write({"step": step, "losses": {"policy": math.nan if step == 3 else 3.0 / step}, "grad_norm": 1.0})
    return folder


def test_whole_report_is_offline_with_the_verdict_first(tmp_path: Path) -> None:
    path = report.write_report(make_run(tmp_path))
    page = Structure(path)
    assert page.fetched
    assert all(source.startswith("data:image/png;base64,") for source in page.fetched)
    assert not {"script", "link", "iframe"} & page.tags
    assert page.headings == ["quick-1", "Key figures", "Curves", "Runtime", "Configuration", "Environment"]
    places = [
        page.text.index(word) for word in ("Verdict: PASS", "top1 27.1% best capture 17.1%", "bf16", "task: chess")
    ]
    assert places == sorted(places)
    assert "measured 1.6 x as fast" in page.text
    assert "53,161,185" in page.text
    assert "3 min 20 s" in page.text


def test_everything_is_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>&'
    folder = make_run(tmp_path, "a&b")
    summary = json.loads((folder / "summary.json").read_text())
    summary["preset"] = summary["stopped_early"] = evil
    summary["evaluation"] = {evil: evil, "baselines": {}}
    summary["runtime"] = {evil: evil, "reasons": {evil: evil}}
    summary["headline"] = evil
    summary["verdict"] = {"passed": False, "checks": [{"name": evil, "passed": False, "detail": evil}]}
    write_json(folder / "summary.json", summary)
    write_json(folder / "run.json", {"commit": evil, "versions": {evil: evil}, "started": evil})
    (folder / "config.yaml").write_text(evil)
    (folder / "notes.txt").write_text(evil)
    for path, scripts in ((report.write_report(folder), 0), (report.write_index(tmp_path), 1)):
        page = Structure(path)
        assert path.read_text().count("<script") == scripts, "the index has one of its own"
        assert "a&b" in page.text
        assert evil in page.text


@pytest.mark.parametrize("name", ["summary.json", "run.json", "config.yaml", "metrics.jsonl"])
def test_a_missing_or_damaged_part_is_named(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path)
    (folder / name).write_text("{broken\n{broken\n")
    assert name == "config.yaml" or f"{name} cannot be read" in Structure(report.write_report(folder)).text
    (folder / name).unlink()
    assert f"{name} is missing" in Structure(report.write_report(folder)).text


def test_a_crashed_run_and_the_verdict_of_a_notebook_have_a_report(tmp_path: Path) -> None:
    """Of a crash before the first update; the probe and the cycle leave a verdict and no run."""
    (tmp_path / "crashed").mkdir()
    with pytest.raises(ValueError, match="no run at"):  # any folder, of a system, say
        report.write_report(tmp_path / "crashed")
    assert list((tmp_path / "crashed").iterdir()) == []
    (tmp_path / "crashed" / "config.yaml").write_text("task: chess")
    assert "Verdict: not finished" in Structure(report.write_report(tmp_path / "crashed")).text
    (tmp_path / "probe").mkdir()
    write_json(tmp_path / "probe" / "summary.json", {"verdict": {"passed": True, "checks": []}})
    page = Structure(report.write_report(tmp_path / "probe"))
    assert page.headings == ["probe"]
    assert "missing" not in page.text


def test_index_and_table_list_runs_newest_first(tmp_path: Path) -> None:
    make_run(tmp_path, "z-old", "2026-01-01T00:00:00Z")
    report.write_report(make_run(tmp_path, "a-new", "2026-02-01T00:00:00Z"))
    (tmp_path / "no-run").mkdir()
    page = Structure(report.write_index(tmp_path))
    assert page.links == ["a-new/report.html"]
    assert page.text.index("a-new") < page.text.index("z-old")
    assert "no-run" not in page.text
    assert page.text.count("PASS") == 2
    assert "27.1%" in page.text
    assert "█▄▁" in page.text, "the loss"
    assert not page.fetched
    table = runs.frame(tmp_path)
    assert table["run"].tolist() == ["a-new", "z-old"]
    assert table["updates"].tolist() == [500, 500]
    assert table["top1"].tolist() == [0.271, 0.271], "numbers, to be sorted"


def test_the_index_tells_what_differs_and_what_somebody_noted(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    record = json.loads((folder / "run.json").read_text())
    requested = {"seed": 7, "data": {"source": "games.pgn"}}
    write_json(folder / "run.json", record | {"requested": requested, "changes": {"optim.learning_rate": 0.002}})
    (folder / "notes.txt").write_text("twice the rate\n")
    write_json(folder / "summary.json", json.loads((folder / "summary.json").read_text()) | {"share_of_peak": 2.32})
    (row,) = runs.frame(tmp_path).to_dict("records")
    assert (row["seed"], row["data"], row["notes"]) == (7, "games.pgn", "twice the rate")
    assert row["changes"] == "optim.learning_rate 0.002"
    page = Structure(report.write_index(tmp_path)).text
    assert "twice the rate" in page
    assert "disturbed" in page, "no share above 100 %"
    assert "232%" not in page
    assert "lost rows" not in page, "a column of nothing"


@pytest.mark.parametrize(
    "strange",
    [{"verdict": 3}, {"evaluation": 5}, {"curve": ["a"]}, {"lost_rows": [1]}, {"evaluation": {"baselines": 1, "a": 1}}],
    ids=str,
)
def test_a_strange_summary_hides_no_other_run(tmp_path: Path, strange: dict[str, Any]) -> None:
    make_run(tmp_path, "sound")
    write_json(make_run(tmp_path, "odd") / "summary.json", strange)
    page = Structure(report.write_index(tmp_path)).text
    assert "holds what no run writes" in page
    assert "27.1%" in page
    assert "holds what no run writes" in Structure(report.write_report(tmp_path / "odd")).text


def test_command_line(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        make_run(reports, name)
    assert report.main(["one"]) == 0
    assert (reports / "one" / "report.html").exists()
    assert not (reports / "two" / "report.html").exists()
    (reports / "one" / "report.html").unlink()
    (reports / "one" / "report.html").mkdir()
    assert report.main([]) == 1, "one that cannot be written is in nobody's way"
    assert "one cannot be written" in capsys.readouterr().err
    assert (reports / "two" / "report.html").exists()
    assert (reports / "index.html").exists()
    assert report.main(["absent"]) == 1
    assert "no run at" in capsys.readouterr().err


def executed(folder: Path, *outputs: Any, end: str | None = "2026-01-01T00:01:00Z") -> Path:
    """A notebook as papermill leaves it."""
    cells = [
        nbformat.v4.new_markdown_cell("# Does it learn?"),
        nbformat.v4.new_code_cell("secret", outputs=list(outputs)),
    ]
    book = nbformat.v4.new_notebook(cells=cells, metadata={"papermill": {"end_time": end}})
    nbformat.write(book, folder / "train.ipynb")
    return folder / "train.ipynb"


def test_the_executed_notebook_is_the_report_without_its_code(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    figure = nbformat.v4.new_output("display_data", {"image/png": base64.b64encode(png(Figure())).decode()})
    notebook = executed(folder, nbformat.v4.new_output("stream", text="held-out top-1 <b>27 %"), figure)
    page = Structure(report.write_report(folder))
    assert page.headings == ["quick-1", "Does it learn?", "Runtime", "Configuration", "Environment"]
    assert "held-out top-1 <b>27 %" in page.text
    assert "secret" not in page.text
    assert [source[:22] for source in page.fetched] == ["data:image/png;base64,"]
    assert not {"script", "link", "iframe"} & page.tags
    os.utime(notebook, (1, 1))
    assert "Key figures" in Structure(report.write_report(folder)).headings, "the run was continued without it"
    executed(folder, end=None)
    assert "Key figures" in Structure(report.write_report(folder)).headings, "it was killed, or is being executed"


def test_warnings_of_the_training_are_in_the_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with closing(MetricsLog(folder / "metrics.jsonl")) as log:
        for step in range(6, 40):
            told = {"memory": "too <high>"}
            if step == 30:
                told |= {"skip": "update skipped, no weight moved: loss nan", "rollback": "rolled back to update 20"}
            row = {"step": step, "losses": {"policy": 1.0}}
            log.write(row | {"messages": list(told.values()), "events": list(told)})
    page = Structure(report.write_report(folder))
    assert page.text.count("too <high>") == report.MAX_MESSAGES
    order = ["rolled back to", "update skipped", "update 20: too <high>", "update 39: too <high>", "and 14 more in"]
    places = [page.text.index(words) for words in order]
    assert places == sorted(places), "what was decided, then the latest"


def test_counters_and_a_clip_threshold_of_the_runs_own_are_in_the_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    outputs = {"policy": {"mean": 0.0, "std": 1.0, "max": 12.5, "infinite": 0.0}}
    with closing(MetricsLog(folder / "metrics.jsonl")) as log:
        for step in range(6, 9):
            row = {"step": step, "losses": {"policy": 1.0}, "skipped": 3, "overflows": 2, "rollbacks": 1}
            row |= {"clip_share": 0.42, "memory": {"peak_mib": 100.0 * step, "share": 0.25, "busy": step / 10}}
            norms = {"median": 0.7, "p95": 1.934}
            log.write(row | {"statistics": {"outputs": outputs, "gradient_norm": norms, "dead_units": {"a": 0.1}}})
        log.write(row | {"step": 9, "statistics": {}, "memory": {}})
    page = Structure(report.write_report(folder))
    for words in (
        "updates skipped 3",
        "not finite 1",
        "falls of the loss scale 2",
        "rollbacks 1",
        "gradients clipped 42.0%",
        "optim.clip_norm that would have clipped 5% of the latest 1.93",
        "largest output 12.5 (policy)",
        "most memory, MiB 800",
        "the GPU was busy, median 70%",
        "dead units, worst activation 10.0% (a)",
    ):
        assert words in page.text

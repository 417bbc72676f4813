"""Options and trials of a sweep; the search is Optuna's, in sweep.ipynb.

reports/<sweep>/sweep.yaml        the options
reports/<sweep>/optuna.log        the study: Optuna's journal
reports/<sweep>-000-s0/ ...       the runs, by trial and seed
"""

import gc
import itertools
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.config import ConfigError, Count, CountOrZero, NonNegative, Positive, Processes, Section, option
from matrixlib.runs.fleet import Kind
from matrixlib.tasks import get_task, load_config

FIXED = ("task", "seed", "train.steps", "train.minutes", "arm", "compute")  # equal for all trials, or own options
HELD_OUT = ("data.source", "data.suspicious")  # keys that change the held-out rows in every task
LESS_IS_BETTER = ("loss", "kl", "nll")  # last words of figures to minimise; others need `highest`
REASON_CHARACTERS = 2000
_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log )?({_NUMBER})\.\.({_NUMBER})(?: in (\d+))?")


class SweepError(ValueError):
    """A sweep cannot continue; says why and what to do."""


class SweepConfig(Section):
    """A sweep: arms, a search space over options, or both, and the method. A trial is one configuration, trained with
    each seed."""

    preset: str = option("demo", "preset of all trials, unless an arm or the space sets another")
    overrides: dict[str, Any] = option({}, "nested mapping over the preset of all trials")
    arms: dict[str, dict[str, Any]] = option({}, "configurations by name: option values, optionally a `preset`")
    space: dict[str, Any] = option({}, "values by key: a list, or a range such as `log 1e-4..1e-2 in 5` (grid points)")
    method: Literal["grid", "random", "tpe", "staged"] = option(
        "grid",
        "how the space is searched; `tpe` adapts to results, `staged` adds arms one by one, keeping those that help",
    )
    tolerance: NonNegative = option(
        0.0, "`staged`: keep an arm whose interval is below this, in units of `measure`; above 0 for smaller networks"
    )
    trials: CountOrZero = option(0, "number of trials of `random` and `tpe`")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = option(0, "first seed of each trial")
    seeds: Count = option(1, "seeds of each trial, equal for all; 2 or more give intervals")
    steps: CountOrZero = option(0, "updates of every run; 0 = as the presets say")
    minutes: NonNegative = option(0.0, "minutes of every run, instead of updates; 0 = by updates")
    compute: tuple[Positive, ...] = option((), "compute budgets (FLOPs of a run): every size is trained with each")
    equal: Literal["", "parameters", "flops"] = option("", "match the first arm by setting `width` in the others")
    width: str = option("model.channels", "integer key that `equal` sets")
    measure: str = option("loss", "objective: `loss` (last full validation) or a held-out figure")
    highest: bool = option(False, "maximise `measure`; required unless it is a loss")
    prune: bool = option(False, "median pruning by the first seed's validation loss, from a third of the updates on")
    workers: Processes = option(1, "processes, which share threads and GPUs")
    fleet: Kind = option(
        "local",
        "`ray`: on the nodes of the Ray cluster that this machine belongs to, which all see the reports' folder",
    )


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, integers if both ends are. points: in a grid, 0 if not given."""

    low: float
    high: float
    log: bool = False
    whole: bool = False
    points: int = 0


def parse(key: str, values: Any) -> list[Any] | Range:
    """`[4, 6, 8]`, `0..0.3`, `2..8` or `log 1e-4..1e-2 in 5`; ConfigError for anything else."""
    if isinstance(values, list):
        if not values or any(one == other for one, other in itertools.combinations(values, 2)):
            raise ConfigError(f"space: '{key}' needs values that differ, not {values!r}")
        return values
    form = _RANGE.fullmatch(values.strip()) if isinstance(values, str) else None
    if form is None:
        raise ConfigError(
            f"space: '{key}' is {values!r}; give a list such as [4, 6, 8], or a range such as 0..0.3, 2..8 or "
            "'log 1e-4..1e-2 in 5'"
        )
    whole = all(re.fullmatch(r"[-+]?\d+", end) for end in (form[2], form[3]))
    number = int if whole else float
    found = Range(number(form[2]), number(form[3]), bool(form[1]), whole, int(form[4] or 0))
    ascends = found.low < found.high < math.inf
    problems: dict[str, object] = {
        "it goes down, or nowhere: the first number must be less than the second": not ascends,
        f"it is logarithmic and begins at {form[2]}: begin above 0": found.log and found.low <= 0,
        "it has too few points: a range in a grid needs 2 at least": form[4] and found.points < 2,
    }
    _refuse(f"space: '{key}'", problems)
    return found


def search_space(sweep: SweepConfig) -> dict[str, list[Any] | Range]:
    """What varies, by key: arms first (staged: each arm on or off), budgets of `compute` last."""
    if bad := [key for key in sweep.space if key in FIXED]:
        raise ConfigError(f"space: '{bad[0]}' is the same for all trials: see the options of a sweep")
    if sweep.method == "staged":
        return {arm: [False, True] for arm in sweep.arms}
    own = {key: parse(key, values) for key, values in sweep.space.items()}
    arms: dict[str, list[Any] | Range] = {"arm": list(sweep.arms)} if sweep.arms else {}
    return arms | own | ({"compute": list(sweep.compute)} if sweep.compute else {})


def load_sweep(preset: str, overrides: Mapping[str, Any] | None = None, device: str = "auto") -> SweepConfig:
    """Read a sweep's preset by name from params/sweep/, or a YAML file by path. overrides: replace whole options.

    ConfigError for unknown keys, invalid values, or trials that are not comparable; SweepError without Optuna.
    """
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise SweepError("sweeps need Optuna: pip install 'matrixlib[sweep]' (or optuna)") from error
    data, name = configuration.read_preset(preset, {}, files.PARAMS / "sweep")
    sweep = configuration.validated(SweepConfig, data | dict(overrides or {}), name)
    if device != "auto":
        overrides = configuration.merge(sweep.overrides, {"runtime": {"device": device}})
        sweep = sweep.model_copy(update={"overrides": overrides})
    space, method = search_space(sweep), sweep.method
    staged, own_number, others = method == "staged", method in ("grid", "staged"), [*sweep.arms.values()][1:]
    greatest = f"is the best {sweep.measure} the greatest or the least? Give `highest: true` or `highest: false`"
    problems: dict[str, object] = {
        "nothing varies: give `space` or `arms`": not space,
        "a staged sweep has arms, no space, no compute and one worker: its stages follow": staged
        and (sweep.space or sweep.compute or sweep.workers > 1),
        "`tolerance` is for a staged sweep": sweep.tolerance and not staged,
        f"`{method}` needs the number of `trials`": not (own_number or sweep.trials),
        f"`trials` is for random and tpe; a {method} sweep has its own number": own_number and sweep.trials,
        "give one budget: steps, minutes or compute": sum(map(bool, (sweep.steps, sweep.minutes, sweep.compute))) > 1,
        greatest: not sweep.measure.endswith(LESS_IS_BETTER) and "highest" not in sweep.model_fields_set,
        f"equal: {sweep.equal} needs two `arms` at least": sweep.equal and not others,
        f"equal: {sweep.equal} sets '{sweep.width}': take it out of space and arms": sweep.equal
        and (sweep.width in sweep.space or any(sweep.width in arm for arm in others)),
    }
    _refuse(name, problems)
    configs = [load_config(*request(sweep, values)) for values in edges(space)]
    first, spec = configs[0], get_task(configs[0].task)
    tasks = ", ".join({config.task for config in configs} - {first.task})
    _refuse(name, {f"trials of {first.task} and of {tasks} cannot be compared": tasks})
    keys = sorted({key for config in configs for key in configuration.difference(config, first)})
    measured_on = [key for key in keys if key.startswith((*HELD_OUT, *spec.measured_on_options))]
    objective = [key for key in keys if key.startswith(("task", *spec.objective_options))]
    budgets = {(config.train.steps, config.train.steps == "auto" and config.train.minutes) for config in configs}
    adaptive = first.validation.plateau > 0 or first.validation.interval == "auto" or first.train.steps == "auto"
    other_rows = any(key.startswith("validation.") for key in keys)
    problems = {
        f"with another {', '.join(measured_on)} trials would be measured on other rows; keep it the same": measured_on,
        f"with another {', '.join(objective)} the losses do not mean the same; set `measure` to a held-out figure, "
        "such as policy_kl, or top1 with `highest: true`, and `prune: false`": objective
        and (sweep.measure == "loss" or sweep.prune),
        f"the presets have other budgets ({budgets}); give `steps` or `minutes`": len(budgets) > 1
        and not sweep.compute,
        "pruning compares at the same updates and rows: give `steps`, a validation.interval in updates, "
        "validation.plateau 0, and all trials the same `validation`": sweep.prune
        and (adaptive or other_rows or len(budgets) > 1),
    }
    _refuse(name, problems)
    return sweep


def _refuse(name: str, problems: Mapping[str, object]) -> None:
    """ConfigError with the first text whose condition holds."""
    for text, holds in problems.items():
        if holds:
            raise ConfigError(f"{name}: {text}")


def attempt(train: bytes, number: int) -> tuple[str, str]:
    """train(number), pickled by cloudpickle, so that cell functions reach other processes. Returns (state, reason).

    Errors fail the trial: ("failed", why). Ctrl-C, SIGTERM, a full disk and unwritable folders end the sweep.
    """
    import cloudpickle

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"update \d+: ")  # already in the run's metrics
            return cloudpickle.loads(train)(number)
    except files.FolderError:
        raise
    except Exception as error:  # noqa: BLE001 - recorded in the trial's row
        return "failed", " ".join(f"{type(error).__name__}: {error}".split())[:REASON_CHARACTERS]
    finally:
        gc.collect()  # run and trainer are a reference cycle; free device memory


def request(sweep: SweepConfig, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(preset, overrides) of the trial with these values, including its budget."""
    preset, changes = sweep.preset, sweep.overrides
    arms = [values["arm"]] if "arm" in values else [arm for arm in sweep.arms if values.get(arm)]
    for arm in arms:
        own = dict(sweep.arms[arm])
        preset = own.pop("preset", preset)
        changes = configuration.merge(changes, configuration.nest(own))
    preset = values.get("preset", preset)
    own = {key: values[key] for key in sweep.space if key in values and key != "preset"}
    if sweep.steps:
        own["train.steps"] = sweep.steps
    if sweep.minutes:
        own |= {"train.steps": "auto", "train.minutes": sweep.minutes}
    changes = configuration.merge(changes, configuration.nest(own))
    if "compute" in values:
        config = load_config(preset, changes)
        flops = get_task(config.task).training_flops(config)
        if not flops:
            raise ConfigError(f"nobody has counted the operations of task {config.task}: give steps or minutes")
        steps = max(1, round(values["compute"] / (flops * config.train.batch_size)))
        changes = configuration.merge(changes, {"train": {"steps": steps}})
    return preset, changes


def edges(space: Mapping[str, list[Any] | Range]) -> Iterator[dict[str, Any]]:
    """Each listed value and each range end, the others at their first."""
    ends = {key: [v.low, v.high] if isinstance(v, Range) else v for key, v in space.items()}
    for key, values in ends.items():
        for value in values:
            yield {other: own[0] for other, own in ends.items()} | {key: value}

"""Strict configuration: YAML in, frozen sections out.

Defaults are in the schema only; a preset in ``params/`` names what differs, and a run's config.yaml has everything.
Unknown, duplicate and mistyped keys are errors that name the key and a fix. A task's own sections are in its folder.
"""

import difflib
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from matrixlib.files import NAME_BYTES, PARAMS


class ConfigError(ValueError):
    """The configuration cannot be used; the message names each key and what to do."""


def _readable(path: str) -> str:
    if not path or os.path.isfile(path):
        return path
    raise ValueError("there is no such file")


def _writable(path: str) -> str:
    place = path if os.path.exists(path) else os.path.dirname(path) or "."
    long = len(os.fsencode(os.path.basename(path))) > NAME_BYTES
    if path and (long or os.path.isdir(path) or not os.access(place, os.W_OK)):
        raise ValueError(
            f"cannot be written: give a file in an existing, writable folder, by a name of at most {NAME_BYTES} bytes"
        )
    return path


InputFile = Annotated[str, AfterValidator(_readable)]  # "" for none
OutputFile = Annotated[str, AfterValidator(_writable)]
_number = BeforeValidator(lambda value: float(value) if isinstance(value, str) else value)  # PyYAML reads 3e-4 as text
Real = Annotated[float, _number, Field(allow_inf_nan=False)]
Positive = Annotated[Real, Field(gt=0)]
NonNegative = Annotated[Real, Field(ge=0)]
Fraction = Annotated[Real, Field(ge=0, le=1)]
AboveZero = Annotated[Real, Field(gt=0, le=1)]
BelowOne = Annotated[Real, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=1 << 53)]
CountOrZero = Annotated[int, Field(ge=0, le=1 << 53)]
Rows = Annotated[int, Field(ge=1, le=1 << 24)]
Width = Annotated[int, Field(ge=1, le=1 << 16)]
Depth = Annotated[int, Field(ge=1, le=1024)]
Processes = Annotated[int, Field(ge=1, le=1024)]
ProcessesOrZero = Annotated[int, Field(ge=0, le=1024)]
Auto = Literal["auto"]
Elementwise = Literal["adamw", "adam", "sgd", "rmsprop", "radam", "nadam", "lamb", "adafactor"]

Source = str | dict[str, Positive]
SEVERAL = "or several, with the weight of each in a batch: `{sample: 1, data/mine: 3}`"


class Section(BaseModel):
    """Base of all sections: frozen, strict types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, data: Any) -> Any:
        """Lists to tuples, which YAML lacks."""

        def made(value: Any) -> Any:
            return tuple(map(made, value)) if isinstance(value, list) else value

        if not isinstance(data, Mapping):
            return data
        names = {name for name, field in cls.model_fields.items() if get_origin(field.annotation) is tuple}
        return {key: made(value) if key in names else value for key, value in data.items()}


def option(default: Any, description: str, **limits: Any) -> Any:
    """A key of a section: default, and description for guides/options.md. limits: of `pydantic.Field`."""
    return Field(default=default, description=description, **limits)


# Sections of the engine, the data and the run: every task has them


class DataConfig(Section):
    source: Source = option("", f"a folder of shards, its URL (s3://...), or a name that the task knows; {SEVERAL}")
    cache: Positive = option(20.0, "GiB for the local cache of all remote data sets")
    limit: CountOrZero = option(0, "first N training positions, the same share of each source; 0 = all")
    window_blocks: CountOrZero = option(0, "shuffle window in blocks of 4,096 records; 0 = all (data fits in memory)")
    suspicious: Literal["use", "quarantine"] = option("use", "outlier shards found by an import")
    workers: ProcessesOrZero | Auto = option("auto", "loader processes; 0 = prepare in the main process")
    prefetch: Processes | Auto = option("auto", "batches prefetched by each worker")
    timeout: NonNegative = option(300.0, "seconds without a batch until workers are restarted; 0 = never")
    max_lost: Fraction = option(0.2, "share of training or held-out rows in corrupt blocks that ends the run")


class OptimConfig(Section):
    optimiser: Literal[Elementwise, "muon", "normuon", "schedule_free", "adamw_8bit"] = option(
        "adamw",
        "`muon`: orthogonal updates of hidden matrices, `normuon` with neuron-wise normalisation; `schedule_free`: an "
        "average in place of decay and ema_decay; `lamb`, `adafactor`: worse top-1 (guide of verdicts)",
    )
    learning_rate: NonNegative = option(0.003, "peak learning rate")
    rate_batch: CountOrZero = option(
        0, "batch size that learning_rate is for: scale by sqrt(train.batch_size / rate_batch); 0 = off"
    )
    schedule: Literal["cosine", "linear", "constant"] = option("cosine", "decay after the warm-up")
    decay_ratio: AboveZero = option(1.0, "share of the updates after the warm-up that decay; the peak before")
    restarts: CountOrZero = option(0, "warm restarts at the peak")
    final_fraction: Fraction = option(0.05, "learning rate at the last update / peak")
    warmup_steps: CountOrZero = option(10, "updates of linear warm-up (the first at 1/warmup, not 0)")
    weight_decay: NonNegative = option(0.05, "decoupled (adam, sgd, rmsprop: L2); not for norms, biases, embeddings")
    beta1: Fraction = option(0.9, "decay of Adam's first moment")
    beta2: Fraction = option(0.98, "decay of Adam's second moment, and of rmsprop's")
    eps: Positive = option(1e-08, "Adam's epsilon")
    momentum: BelowOne = option(0.95, "of muon (matrices) and sgd")
    clip_norm: Positive = option(1.0, "global gradient norm above which gradients are scaled down")
    noise: NonNegative = option(0.0, "variance of normal gradient noise at the first update; 0.01 costs top-1")
    noise_decay: NonNegative = option(0.55, "g of its decay, noise / (1 + update)^g")
    plateau: CountOrZero = option(0, "full validations without improvement before the rate is cut; 0 = never")
    plateau_factor: Annotated[Real, Field(gt=0, lt=1)] = option(0.5, "factor of a plateau cut")
    ema_decay: BelowOne = option(0.999, "moving average of the weights, evaluated and exported; 0 = off")
    swa: Fraction = option(0.0, "last share of the updates for stochastic weight averaging (SWA); 0 = off")
    swa_interval: Count = option(10, "updates between averaged weights (SWA)")

    @model_validator(mode="after")
    def _fits_its_schedule(self) -> Self:
        if self.optimiser == "schedule_free" and (self.schedule != "constant" or not self.beta1 or self.swa):
            raise ValueError(
                "schedule_free averages in place of a decay: set optim.schedule to constant, beta1 above 0 and swa to 0"
            )
        if self.schedule == "constant" and (self.restarts or self.decay_ratio < 1):
            raise ValueError("a constant schedule does not decay: leave optim.restarts at 0 and decay_ratio at 1")
        return self


class TrainConfig(Section):
    steps: Count | Auto = option("auto", "updates; `auto` = as many as fit in `minutes`, timed once as the run begins")
    minutes: Positive = option(10.0, "training time aimed at where steps is `auto`")
    epochs: NonNegative = option(0.0, "passes over the training data for steps `auto`, in place of `minutes`; 0 = off")
    init: str = option("", "initial weights: a run, a checkpoint, Lc0's `.pb.gz` or Matrix0's `.pt`; empty = random")
    init_partial: bool = option(False, "load only what fits by name and shape; the rest is listed")
    freeze: tuple[str, ...] = option((), "parts of the network that stay as they are, such as [stem, tower.0]")
    batch_size: Rows = option(128, "positions in one update")
    micro_batch: Count | Auto = option("auto", "positions in one forward pass (gradient accumulation)")
    dropout_stages: tuple[Fraction, ...] = option(
        (), "dropout factors in equal parts of the run, such as [1, 0.5, 0]; empty = none", max_length=5
    )
    statistics_interval: Count = option(500, "updates between output and gradient statistics")
    targets_interval: CountOrZero = option(0, "updates between rows of targets.jsonl; 0 = off")
    heartbeat_seconds: Positive = option(5.0, "seconds between heartbeat.json writes")
    tensorboard: bool = option(False, "also write TensorBoard events, to `events` of the run's folder")


class OpeningOptions(Section):
    openings: str = option("", "file of openings: .pgn, .epd, .fen or Polyglot's .bin; empty = none")
    opening_plies: Count = option(16, "most plies of an opening from a .pgn or .bin file")


class StrengthConfig(OpeningOptions):
    """Matches of the network in training against an anchor; for games."""

    every: CountOrZero = option(0, "updates between matches; the last update has one, too; 0 = off")
    anchor: str = option("", "a run, checkpoint, file or engine (`toga2 depth=4`); empty = the run's first weights")
    pairs: Count = option(16, "pairs of games: one opening, sides swapped; the same openings each time")
    simulations: CountOrZero = option(16, "simulations of a move; 0 = the most probable move, or a mate in one")
    random_plies: Count = option(6, "random plies of an opening where there is no file of them")
    plies: Count = option(240, "longer games are drawn")


class ValidationConfig(Section):
    interval: Count | Auto = option(500, "updates between validations; `auto` = by `share` of the time")
    share: Annotated[Real, Field(gt=0, lt=1)] = option(0.05, "share of the time for validation with interval `auto`")
    sample: Count = option(1024, "positions in the fixed sample of a validation")
    limit: CountOrZero = option(0, "use only N held-out rows, taken as those of data.limit; 0 = all")
    full_every: Count = option(3, "every k-th validation uses the whole set")
    batch_size: Rows = option(512, "positions in one forward pass of validation")
    plateau: CountOrZero = option(0, "validations without improvement after which they get rarer; 0 = off")
    plateau_factor: Count = option(3, "how many times rarer on a plateau")
    patience: CountOrZero = option(0, "full validations without improvement before stopping; 0 = off")
    min_delta: NonNegative = option(0.001, "smallest improvement of the validation loss that counts")
    target_loss: NonNegative = option(0.0, "stop at this full validation loss; an error below the floor; 0 = off")
    strength: StrengthConfig = StrengthConfig()


class HealthConfig(Section):
    window: Annotated[int, Field(ge=8)] = option(50, "accepted updates in the bands of loss and gradient norm")
    band: Positive = option(10.0, "robust standard deviations above the median of an outlier")
    patience: Count = option(5, "outliers in a row before a rollback")
    skips: Count = option(10, "non-finite updates in a row before a rollback")
    rollbacks: CountOrZero = option(3, "most rollbacks; one more halts the run with a diagnosis")
    rate_factor: AboveZero = option(0.5, "factor on the learning rate after a rollback")
    rate_recovery: CountOrZero = option(10, "updates over which the factor recovers to 1")
    clip_warning: AboveZero = option(0.1, "warn above this share of clipped gradients after the warm-up")
    update_warning: Positive = option(0.1, "warn above this update-to-weight ratio of a block after the warm-up")
    dead_warning: Fraction = option(0.05, "warn above this share of dead units of an activation")
    collapse_warning: NonNegative = option(1e-4, "warn where an output deviates less over rows (RMS, logits)")
    initial_warning: NonNegative = option(0.15, "warn where a first loss is further from chance level (relative)")
    waiting_warning: Fraction = option(0.2, "warn above this share of the time that updates wait for data")
    overflow_warning: Count = option(3, "warn from so many falls of the loss scale in 100 updates on")
    hooks: bool = option(True, "replay a non-finite update to name the module that first produced it")


class GatingConfig(Section):
    warmup_steps: CountOrZero = option(0, "updates over which SSL weights ramp up")
    freeze_steps: CountOrZero = option(0, "updates without SSL terms after an unstable one; 0 = never")
    seconds: NonNegative = option(0.0, "time limit of the SSL terms in an update (not reproducible); 0 = none")


class MemoryConfig(Section):
    limit: Fraction = option(0.0, "share of the accelerator's memory that this process may use; 0 = no limit of ours")
    warn: Fraction = option(0.85, "warn above this share of memory in use")
    clear: Fraction = option(0.92, "empty the allocator's cache above this share")


class CheckpointConfig(Section):
    interval: Count = option(500, "updates between checkpoints")
    minutes: NonNegative = option(10.0, "most minutes between checkpoints; 0 = by updates alone")
    keep: Annotated[int, Field(ge=2)] = option(2, "newest checkpoints kept (at least two), besides the best")
    keep_best: Count = option(1, "best checkpoints kept, by full validation loss")
    keep_every: CountOrZero = option(0, "updates between checkpoints that are kept forever; 0 = none")
    compress: Annotated[int, Field(ge=0, le=19)] = option(0, "zstd level of tensor files (a tenth smaller); 0 = none")
    backup: str = option("", "folder or URL (s3://...) for verified copies of the run's checkpoints and files")


class RuntimeConfig(Section):
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "`auto` = the best that works")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = option("auto", "autocast dtype; weights stay fp32")
    threads: Processes | Auto = option("auto", "intra-op threads on the CPU; results depend on it bit by bit")
    rank_timeout: Positive = option(600.0, "seconds until a silent rank counts as hung")
    shard: bool = option(False, "shard weights, gradients and optimizer state over ranks (FSDP2)")
    channels_last: bool | Auto = option("auto", "memory format of convolutions")
    compile: bool | Literal["auto", "default", "reduce-overhead", "max-autotune"] = option(
        False, "mode of torch.compile (true = default); `auto` = on a GPU where the compiler works"
    )


class Config(Section):
    """Sections that engine, data and runs need; tasks add theirs. Each task has a `model` and a `loss`, and may extend
    `data`."""

    if TYPE_CHECKING:  # typed by the task's schema
        model: Any
        loss: Any

    task: str = Field(description="what is trained; determines the other sections")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = option(0, "seed of every random stream")
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    health: HealthConfig = HealthConfig()
    gating: GatingConfig = GatingConfig()
    memory: MemoryConfig = MemoryConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    runtime: RuntimeConfig = RuntimeConfig()


class _UniqueLoader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys: PyYAML silently keeps the last."""

    def mapping(self, node: yaml.MappingNode) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node), key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(f"line {line}: key {key!r} is not a word; put it in quotes")
            if key in lines:
                raise ConfigError(f"key '{key}' stands twice (lines {lines[key]} and {line}); keep one")
            lines[key] = line
        return self.construct_mapping(node, deep=True)


_UniqueLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _UniqueLoader.mapping)


def read_yaml(text: str, name: str) -> dict[str, Any]:
    """Parse YAML text to a mapping; `name` is for error messages.

    ConfigError for invalid YAML, a duplicate key, or anything but a mapping.
    """
    try:
        data = yaml.load(text, _UniqueLoader)
    except (ConfigError, RecursionError, yaml.YAMLError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ConfigError(f"{name}: {'' if isinstance(error, ConfigError) else 'not valid YAML: '}{what}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: expected sections like 'model:', got {type(data).__name__}")
    return data


def read_yaml_file(path: Path, name: str) -> dict[str, Any]:
    """`read_yaml` of a file; ConfigError also if unreadable or not UTF-8."""
    try:
        return read_yaml(path.read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read as UTF-8 text ({error})") from error


def presets(folder: Path | None = None) -> list[str]:
    """Names of the presets in params/, or in another folder."""
    return sorted(path.stem for path in (folder or PARAMS).glob("*.yaml"))


def read_preset(
    preset: str, overrides: Mapping[str, Any] | None = None, folder: Path = PARAMS
) -> tuple[dict[str, Any], str]:
    """(nested data, name for messages) of a preset in `folder`, or of a YAML file by path, with overrides applied.
    ConfigError for an unknown preset, with the nearest name."""
    path = Path(preset) if preset.endswith((".yaml", ".yml")) else folder / f"{preset}.yaml"
    if not os.path.isfile(path):
        known = presets(folder)
        what = "a folder is no preset:" if os.path.isdir(path) or os.path.isdir(preset) else "unknown preset"
        raise ConfigError(f"{what} {_short(preset)}{nearest(preset, known)} (presets: {', '.join(known)})")
    return merge(read_yaml_file(path, path.name), overrides or {}), path.name


_Kind = TypeVar("_Kind", bound=Section)


def validated(schema: type[_Kind], data: Mapping[str, Any], name: str, prefix: str = "", context: Any = None) -> _Kind:
    """A section of this schema; ConfigError names every bad key. `name` precedes the message, `prefix` each key.
    context: of the schema's validators."""
    try:
        return schema.model_validate(dict(data), context=context)
    except ValidationError as error:
        errors = error.errors()
    messages: dict[str, list[str]] = {}
    got: dict[str, str] = {}
    for item in errors:
        section: type[Section] = schema
        path: list[str] = []
        for part in map(str, item["loc"]):  # pydantic appends names of a union's alternatives
            path.append(part)
            inner: Any = section.model_fields[part].annotation if part in section.model_fields else None
            if not (isinstance(inner, type) and issubclass(inner, Section)):
                break
            section = inner
        key = prefix + ".".join(path)
        if item["type"] == "extra_forbidden":
            known = sorted(section.model_fields)
            messages[f"unknown key '{key}'{nearest(path[-1], known)} (known: {', '.join(known)})"] = []
        elif item["type"] == "missing":
            messages[f"key '{key}' is missing"] = []
        else:
            where = f"'{key}': " if key else ""  # of all keys together
            messages.setdefault(where, []).append(item["msg"].removeprefix("Value error, "))
            got[where] = "" if isinstance(item["input"], Mapping) else f", got {_short(item['input'])}"
    words = [key + " or: ".join(texts) + got.get(key, "") for key, texts in messages.items()]
    raise ConfigError(f"{name}: {'; '.join(words)}")


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `overrides`; neither argument is changed."""
    out = dict(base)
    for key, value in overrides.items():
        inside = out.get(key)
        out[key] = merge(inside, value) if isinstance(inside, Mapping) and isinstance(value, Mapping) else value
    return out


def nearest(word: str, known: list[str]) -> str:
    """', did you mean ...?' for a misspelt word, or ""."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5) or [name for name in known if name.startswith(word)]
    return f", did you mean '{close[0]}'?" if close else ""


def _short(value: Any) -> str:
    """A value's repr, truncated; YAML aliases can make small texts huge."""
    return repr(value)[:400] if isinstance(value, str) else reprlib.repr(value)[:400]


def dump(config: Section) -> dict[str, Any]:
    """Plain nested data for YAML and JSON; parse(dump(c)) == c."""
    return config.model_dump(mode="json")


def to_yaml(config: Section) -> str:
    return yaml.safe_dump(dump(config), sort_keys=False, allow_unicode=True)


def difference(new: Section, old: Section) -> dict[str, tuple[Any, Any]]:
    """Differing keys: dotted path -> (old, new); None where the old task lacks the key."""
    before, after = dotted(dump(old)), dotted(dump(new))
    return {key: (before.get(key), value) for key, value in after.items() if before.get(key) != value}


def dotted(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Nested sections as `section.key` -> value."""
    out: dict[str, Any] = {}
    for key, value in sections.items():
        out |= {f"{key}.{k}": v for k, v in dotted(value).items()} if isinstance(value, Mapping) else {key: value}
    return out


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as a nested mapping."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        out = merge(out, value)
    return out

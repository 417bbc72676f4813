"""Sizes of networks: parameters and operations of a configuration, and the width that makes one equal to another."""

from collections.abc import Callable

from matrixlib.config import Config, ConfigError
from matrixlib.tasks import get_task

TOLERANCE = 0.1
"""Share by which an arm may differ from the first one and still count as equal."""
MULTIPLE = 8
"""Widths are multiples of it."""
WIDEST = 4096


def parameters(config: Config) -> float:
    """Numbers of the network that a configuration builds."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = get_task(config.task).task(config).build_model()
    return float(sum(parameter.numel() for parameter in model.parameters()))


def flops(config: Config) -> float:
    """Floating-point operations of a forward pass over one row: a third of those of training on it (Kaplan et al.
    2020, section 2.1). ConfigError where the task has not counted them."""
    counted = get_task(config.task).training_flops(config)
    if not counted:
        raise ConfigError(f"nobody has counted the operations of task {config.task}; make arms equal in parameters")
    return counted / 3


def nearest_width(size: Callable[[int], float], wanted: float) -> int:
    """The multiple of `MULTIPLE` for which `size` comes nearest to what is wanted, of those that a network can have;
    sizes grow with the width."""
    known: dict[int, float] = {}
    for width in range(MULTIPLE, WIDEST + 1, MULTIPLE):
        try:
            known[width] = size(width)
        except ValueError:  # its heads or groups do not divide it
            continue
        if known[width] >= wanted:
            break
    if not known:
        raise ConfigError(f"no width up to {WIDEST} makes a network: set the widths of the arms yourself")
    return min(known, key=lambda width: abs(known[width] - wanted))

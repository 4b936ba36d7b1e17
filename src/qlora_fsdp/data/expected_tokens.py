"""How many tokens a run will train on, as far as can be told before its data is read. Imports no torch."""

from __future__ import annotations

from qlora_fsdp.config.data_sets import all_paths, match, mixed_sets, settings_for
from qlora_fsdp.config.schema import SHORTEST, DataConfig, TrainingConfig

BYTES_A_TOKEN = 4.0  # of text in a file of rows, as an estimate
EXAMPLE = 1e8  # tokens of a run about whose data nothing is known
EXAMPLE_SOURCE = "an example: "  # where a number of tokens comes from then begins with this


def expect_tokens(data: DataConfig, training: TrainingConfig, tokens_a_step: int) -> tuple[float, str]:
    """Returns the tokens of the run, and where the number comes from.

    Args:
        data: the files, and what is left out of them.
        training: how often they are seen.
        tokens_a_step: what a step of all ranks has room for.
    """
    if training.max_steps is not None:
        return training.max_steps * tokens_a_step, f"training.max_steps={training.max_steps}"
    if isinstance(data.mix_until, int):
        return training.num_epochs * data.mix_until, f"data.mix_until={data.mix_until}"
    names = all_paths(data)
    missing = [name for name in names if not match(name)]
    if missing and data.is_default:
        return (
            EXAMPLE,
            f"{EXAMPLE_SOURCE}the run would train on {missing[0]}, the default; data.path= names your own data",
        )
    if missing:
        return EXAMPLE, f"{EXAMPLE_SOURCE}{', '.join(missing)} is not here"
    if not names:
        return EXAMPLE, f"{EXAMPLE_SOURCE}set data.path or training.max_steps for your own"
    num_bytes = _bytes_of_an_epoch(data)
    fewer = " and ".join(_what_takes_a_part(data))
    source = f"{num_bytes / 1e6:,.1f} MB of data, 4 bytes a token{f'; less by {fewer}' if fewer else ''}"
    return training.num_epochs * (1 - data.eval_fraction) * num_bytes / BYTES_A_TOKEN, source


def _bytes_of_an_epoch(data: DataConfig) -> float:
    """Bytes of the files, those of a mix as often as their rows are repeated, as if all rows had one length."""
    if not data.mix:
        return sum(map(_num_bytes, all_paths(data)))
    weights = {name: own.weight for name, own in mixed_sets(data).items()}
    of_all = min if data.mix_until == SHORTEST else max
    return sum(weights.values()) * of_all(_num_bytes(name) / weight for name, weight in weights.items())


def _what_takes_a_part(data: DataConfig) -> list[str]:
    """The settings that leave out some rows of the files."""
    sets = [settings_for(name, data) for name in data.mix] or [data]
    has_number, has_slice = any(own.max_rows is not None for own in sets), any("[" in own.split for own in sets)
    return [*(["data.max_rows"] if has_number else []), *(["data.split"] if has_slice else [])]


def _num_bytes(name: str) -> int:
    paths = match(name)
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return sum(file.stat().st_size for file in files)

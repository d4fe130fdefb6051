"""`counterflow replay`: a run's learner once more, on its archived groups, without generators.

`replay` is a typer command: a run folder and overrides flow in; a line a step, and a model folder if asked, flow out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterflow.errors import ConfigError
from counterflow.place import check_run_folder, read_config, read_place

if TYPE_CHECKING:
    from counterflow.configs import RunConfig
    from counterflow.learner.trainer import Trainer
    from counterflow.records import StepRecord

_COLUMNS = {
    "groups": "d",
    "tokens": "d",
    "reward_mean": ".4f",
    "loss": ".6f",
    "grad_norm": ".4f",
    "learning_rate": ".3g",
    "kl_reference": ".3g",
    "kl_behavior_k3": ".3g",
    "ess_sequence": ".3f",
    "lag_mean": ".2f",
    "lag_max": "d",
}
_COMPARED = ("loss", "grad_norm", "learning_rate", "entropy", "kl_reference", "kl_behavior_k3")
"""What two steps have in common only if weights, groups and objective are the same."""
_READ = ("learner.", "model.", "objective.", "sampling.")
_READ_KEYS = (
    "admission.max_lag",
    "admission.staleness",
    "admission.decay",
    "reward.truncated",
    "run.seed",
    "run.steps",
)
"""All that a replay reads: the groups, with their rewards, are the archive's."""


def replay(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="What to do otherwise, as objective.kl.beta=0.")
    ] = None,
    until: Annotated[
        int | None, typer.Option(metavar="STEP", min=1, help="The last step; the archive's by default.")
    ] = None,
    checkpoint: Annotated[
        int, typer.Option(metavar="VERSION", min=0, help="The checkpoint to begin with; 0 is the model itself.")
    ] = 0,
    model: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write the model that comes of it.")] = None,
) -> None:
    """Train RUN's archived groups again and print each step; exit with 1 where the same is not the same."""
    from counterflow.buffer.archive import last_step
    from counterflow.configs import as_data, load_config
    from counterflow.configs.resumable import changed_keys
    from counterflow.learner.replay import replay as steps_of
    from counterflow.recorder import read_run

    check_run_folder(folder)
    recorded = {record.step: record for record in read_run(folder).steps}
    archive = folder / "archive"
    # Read later than the records: a living run goes on meanwhile.
    ends = last_step(archive) if archive.is_dir() else None
    if until is not None and ends is not None and until > ends:
        raise ConfigError(f"{archive} ends with step {ends}: give --until {ends} or less")
    if until is not None and until <= checkpoint:
        raise ConfigError(f"--until {until} is not after --checkpoint {checkpoint}: no step is left to take")
    if model is not None:
        _make(model)
    own = read_config(folder)
    config = load_config(folder / "config.yaml", overrides) if overrides else own
    changed = changed_keys(as_data(own), as_data(config)) if overrides else []
    if unread := [key for key in changed if key not in _READ_KEYS and not key.startswith(_READ)]:
        raise ConfigError(
            f"override {', '.join(unread)}: a replay trains the archived groups and does not read it: leave it out"
        )
    trainer = _trainer(folder, own, config, checkpoint)
    lost = ends is not None and ends < max(recorded, default=0)
    if lost:
        typer.echo(f"{archive} ends with step {ends}, the run took {max(recorded)}: restore the archive's end")
    max_lag = config.admission.max_lag
    typer.echo(" ".join(["  step", *(f"{name:>14}" for name in _COLUMNS)]))
    equal, other = 0, []
    for record, left_out in steps_of(trainer, archive, until, max_lag):
        said = f"  groups staler than {max_lag:g}, left out: {left_out}" if left_out else ""
        typer.echo(f"{trainer.version:6d} {_line(record)}{said}")
        there = recorded.get(trainer.version)
        if record is not None and there is not None:
            if _same(record, there):
                equal += 1
            else:
                other.append(trainer.version)
    if model is not None:
        trainer.save(model)
        typer.echo(f"model: {model}")
    if changed:
        typer.echo(
            f"off the run's own policy: other {', '.join(changed)}. The groups were sampled by the run's versions, not "
            "by these: kl_behavior_k3 says how far they are from each other, and lag counts the run's versions."
        )
        return
    typer.echo(f"{equal} of {equal + len(other)} recorded steps are the same in {', '.join(_COMPARED)}")
    exact = own.learner.dtype == "float32" and not own.learner.gpus and own.learner.ranks == 1
    if other and exact:
        typer.echo(f"the first that differs is step {other[0]}: other threads, another torch, or damaged data")
        raise typer.Exit(1)
    if lost and until is None:
        raise typer.Exit(1)
    if other:
        typer.echo("the run had several ranks, a GPU or bfloat16: a replay, on one, adds up in another order")


def _make(model: Path) -> None:
    """See before the work that what comes of it can be written."""
    try:
        model.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--model {model} cannot be made ({(error.strerror or str(error)).lower()}): name another folder"
        ) from error


def _trainer(folder: Path, own: RunConfig, config: RunConfig, checkpoint: int) -> Trainer:
    """A trainer of `config` at the version of the checkpoint."""
    from transformers.utils.logging import disable_progress_bar

    from counterflow import preflight
    from counterflow.buffer.archive import read_steps
    from counterflow.learner.checkpoint import checkpoint_path, chosen_version, load_checkpoint, read_manifest
    from counterflow.learner.objective_choice import check_objective
    from counterflow.learner.trainer import Trainer

    place, first = read_place(folder), next(read_steps(folder / "archive"), None)
    if place is None or first is None:
        raise ConfigError(f"{folder}: the run ended before it trained anything")
    origin = preflight.origin_of(own, place.run_id)
    if first.groups[0].schema.metadata[b"model_fingerprint"].decode() != origin.model_fingerprint:
        raise ConfigError(f"model.path {own.model.path} holds another model than the run began with: restore that one")
    check_objective(config)
    disable_progress_bar()
    trainer = Trainer(config.replacing("learner", ranks=1))
    if version := chosen_version(folder / "checkpoints", checkpoint):
        path = checkpoint_path(folder / "checkpoints", version)
        manifest = read_manifest(path, origin, own)
        trainer.load_state(load_checkpoint(path, manifest, trainer.state()))
    return trainer


def _line(record: StepRecord | None) -> str:
    if record is None:
        return "  no group is left: the step is left out"
    return " ".join(f"{getattr(record, name):>14{form}}" for name, form in _COLUMNS.items())


def _same(one: StepRecord, other: StepRecord) -> bool:
    # NaN is the same as NaN here.
    return all(repr(getattr(one, name)) == repr(getattr(other, name)) for name in _COMPARED)

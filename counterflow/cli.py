"""The command line: `counterflow run | scale | replay | audit | inspect | ledger | config | model | report`.

Exit codes: 0 done, 1 the run failed, 2 bad input with nothing started, 130 interrupted.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from counterflow.cli_audit import audit
from counterflow.cli_inspect import inspect
from counterflow.cli_ledger import ledger
from counterflow.cli_replay import replay
from counterflow.errors import ConfigError, CounterflowError, UnavailableError
from counterflow.output import checked_output, give_up_unwritten
from counterflow.place import check_run_folder

_SCALE_TIMEOUT_S = 60.0

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous off-policy reinforcement learning for language models.",
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, as configs/quickstart.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="As learner.lr=3e-4.")]


@app.command()
def run(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="YAML file, as configs/quickstart.yaml; none with --resume.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with the run in this folder.")] = None,
    checkpoint: Annotated[
        int | None, typer.Option(metavar="VERSION", help="The checkpoint to resume from; 0 is the model itself.")
    ] = None,
    lose_branch: Annotated[
        bool, typer.Option("--lose-branch", help="Resume though steps are missing from the archive: give them up.")
    ] = False,
) -> None:
    """Run CONFIG to its last step and write the report; or go on with a run that ended before its last step."""
    from counterflow.configs import load_config

    if resume is None:
        if config is None or checkpoint is not None or lose_branch:
            raise ConfigError("give a CONFIG to run, or a run folder to --resume; the other options are for resuming")
        loaded = load_config(Path(config), overrides or [])
        from counterflow.system import run as run_system

        report = run_system(loaded)
    else:
        from counterflow.resume import resumed_config, resumption

        loaded = resumed_config(resume, [*([config] if config else []), *(overrides or [])])
        how = resumption(resume, checkpoint, lose_branch)
        from counterflow.system import run as run_system

        report = run_system(loaded, how)
    typer.echo(f"report: {report}")


@app.command()
def scale(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that is going on.")],
    actors: Annotated[int, typer.Option(metavar="N", help="How many actors it is to have.")],
) -> None:
    """Have RUN go on with N actors: some join when their engines have started, or leave when their groups are done."""
    from counterflow.scaling import ask

    standing = ask(folder, actors, _SCALE_TIMEOUT_S)
    typer.echo(f"{standing.serving} actor(s) serve, {standing.wanted} are to: the run says when one joins or leaves")


app.command()(replay)
app.command()(audit)
app.command()(inspect)
app.command()(ledger)


@app.command("config")
def show_config(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print what a run would use, with the meaning of each key."""
    from counterflow.configs import describe, load_config

    typer.echo(describe(load_config(config, overrides or [])))


@app.command()
def model(
    name: Annotated[str, typer.Argument(help="`sums` or `smollm2-135m`.")],
    folder: Annotated[Path | None, typer.Argument(help="Where to put it; .cache/models/NAME by default.")] = None,
) -> None:
    """Make a starting model; one that is there is kept."""
    from counterflow.models import MODELS

    if name not in MODELS:
        raise ConfigError(f"there is no starting model {name!r}: choose one of {', '.join(MODELS)}")
    folder = folder or Path(".cache/models") / name
    MODELS[name](folder)
    typer.echo(f"model: {folder}")


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]) -> None:
    """Write a run's report again."""
    check_run_folder(folder)
    from counterflow.report.render import write_report

    typer.echo(f"report: {write_report(folder)}")


def main() -> None:
    """Entry point: errors of ours become one line and an exit code."""
    try:
        with checked_output():
            app()
    except (ConfigError, UnavailableError) as error:
        _fail(error, 2)
    except CounterflowError as error:
        _fail(error, 1)


def _fail(error: CounterflowError, code: int) -> None:
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"counterflow: error: {error}\n")
        give_up_unwritten(sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

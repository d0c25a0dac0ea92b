"""The `eyas` command. Heavy modules are imported by the command that needs them."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from eyas.errors import EyasError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would cost half of the start-up time
    help="From prompts to an EAGLE-3 drafter. "
    "`make run` runs the whole pipeline; these are its tools.",
)


@app.command()
def params(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Hydra overrides, e.g. experiment=tiny")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if params.yaml has drifted")
    ] = False,
) -> None:
    """Compose conf/ into params.yaml, and check every key."""
    from eyas.desk import params as desk
    from eyas.files import write_text

    text = desk.compose(overrides or ())
    desk.check(text)
    if not check:
        write_text(desk.PARAMS_FILE, text)
        typer.echo(f"{desk.PARAMS_FILE}: written")
    elif drift := desk.drift(text):
        typer.echo(drift)
        raise typer.Exit(1)
    else:
        typer.echo(f"{desk.PARAMS_FILE}: in step with {desk.CONF_FOLDER}/")


@app.command()
def options(
    section: Annotated[str, typer.Argument(help="e.g. train, runtime.connection")] = "",
) -> None:
    """Print every option with its type, value and meaning, as in docs/options.md."""
    from eyas.desk.options import render

    typer.echo(render(section), nl=False)


@app.command()
def serve(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one")] = 8800,
    simulate: Annotated[
        Path | None,
        typer.Option(help="Serve this simulated market instead, e.g. conf/simulation/default.yaml"),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(help="With --simulate: count tokens as this codec does over models/target"),
    ] = None,
) -> None:
    """Serve the local target behind OpenRouter's chat API, as configured in params.yaml."""
    if simulate:
        from eyas.desk.rehearsal import serve_simulation

        serve_simulation(simulate, port=port, codec=codec)
        return
    if codec:
        raise EyasError("serve: --codec counts for --simulate only; the target counts itself")
    from eyas.desk import local_endpoint
    from eyas.desk.params import read_params

    local_endpoint.serve_from_params(read_params(), port=port)


@app.command()
def plan(
    yes: Annotated[
        bool, typer.Option("--yes", help="Allow each data set its high end from now on")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Plain values")] = False,
) -> None:
    """Foretell requests, tokens, dollars, minutes and disk. Exit code 1 where a yes is wanted."""
    from rich.console import Console

    from eyas.desk import plan as desk
    from eyas.desk.params import read_params

    made = desk.make_plan(read_params())
    if as_json:
        import orjson

        typer.echo(orjson.dumps(desk.to_dict(made)).decode())
    else:
        Console().print(desk.render(made))
    if yes:
        desk.say_yes(made)
    elif made.needs_yes:
        raise typer.Exit(1)


@app.command("import")
def import_(
    dataset: Annotated[str, typer.Argument(help="Data set, as under conf/datasets")],
    file: Annotated[Path, typer.Argument(help="JSONL of answers: id or messages, content, ...")],
) -> None:
    """Bring answers bought elsewhere into a data set's journal; they are not asked for again.

    Exit code 1 if none was taken.
    """
    from eyas.desk.importing import import_answers
    from eyas.desk.params import read_params

    result = import_answers(read_params(), dataset, file)
    for line in result.lines():
        typer.echo(line)
    if not result.taken:
        raise typer.Exit(1)


@app.command()
def status(
    source: Annotated[
        str, typer.Argument(help="A folder or file, here or as ssh://[user@]host/PATH")
    ] = "var/status",
    watch: Annotated[bool, typer.Option("--watch", help="Draw again every two seconds")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON line for each stage")] = False,
) -> None:
    """Show the stages at work. Exit code: 0 running or done, 3 stalled, 4 failed."""
    import time

    from rich.console import Console

    from eyas.desk import status as desk

    console = Console()
    if watch and not as_json:
        raise typer.Exit(desk.watch(source, console))
    found, now_s = desk.read_status(source), time.time()
    if as_json:
        import orjson

        for word in found:
            typer.echo(orjson.dumps(word | {"state": desk.state_of(word, now_s)}).decode())
    else:
        console.print(desk.render(found, now_s))
    raise typer.Exit(desk.exit_code(found, now_s))


@app.command()
def summary() -> None:
    """Print what the last run made: data, money, drafter, and where to look next."""
    from eyas.desk.summary import print_summary

    print_summary(Path())


@app.command()
def report(
    compare: Annotated[
        tuple[str, str],
        typer.Option(help="Two runs: git revisions, experiments of DVC, folders (`.`, a job's)"),
    ],
    out: Annotated[Path, typer.Option(help="The page")] = Path("reports/compare.html"),
) -> None:
    """Hold two runs against each other on a page. The page of one run: `dvc repro report`."""
    from eyas.desk.compare import build_comparison
    from eyas.desk.runs import read_run
    from eyas.files import write_text

    write_text(out, build_comparison(*map(read_run, compare)))
    typer.echo(f"{out}: written")


@app.command()
def lineage(
    folder: Annotated[Path, typer.Argument(help="An export folder")] = Path("models/export"),
    as_json: Annotated[bool, typer.Option("--json", help="Plain values")] = False,
) -> None:
    """Tell where a drafter comes from: commit, parameters, data, providers, dollars, rejects."""
    from eyas.desk import lineage_lookup as desk

    told = desk.read_lineage(folder)
    found = desk.look_up(folder, told["datasets"])
    if as_json:
        import orjson

        typer.echo(orjson.dumps(told | found).decode())
        return
    for line in desk.render(folder, told, found):
        typer.echo(line)


@app.command()
def verify() -> None:
    """Check every shard of the hidden-state store against its manifest."""
    from eyas.desk.params import read_params
    from eyas.settings import Runtime
    from eyas.states.store import verify as faults_of

    manifest = Path("data/hidden_states/manifest.json")
    faults = faults_of(manifest, Path(read_params().knob("runtime", Runtime).store))
    for fault in faults:
        typer.echo(fault)
    if faults:
        raise typer.Exit(1)
    typer.echo(f"{manifest}: every shard is there and unaltered")


@app.command()
def store(
    way: Annotated[Literal["push", "pull", "export", "import"], typer.Argument(help="What to do")],
    place: Annotated[
        str | None,
        typer.Argument(help="Folder; push, pull: or s3://..., none: beside DVC's remote"),
    ] = None,
    form: Annotated[
        Literal["speculators", "specforge"], typer.Option(help="export, import: whose files")
    ] = "speculators",
    codec: Annotated[str, typer.Option(help="export: bf16; fp8 for speculators")] = "bf16",
    out: Annotated[Path | None, typer.Option(help="import: folder of the new store")] = None,
) -> None:
    """Share the hidden states, of which DVC has the manifest only; what is there is not copied.

    export, import: to or from a folder that another trainer reads or wrote.
    """
    import logging

    from eyas.desk.params import read_params
    from eyas.desk.remote import states_remote
    from eyas.settings import Runtime
    from eyas.states import sharing

    logging.basicConfig(format="%(message)s")
    logging.getLogger("eyas").setLevel(logging.INFO)  # a line for each shard
    if way in ("export", "import"):
        from eyas.desk.exchange import exchange

        typer.echo(exchange(way, form, place, out, codec))
        return
    address, options = states_remote(place)
    folder = Path(read_params().knob("runtime", Runtime).store)
    move = sharing.push if way == "push" else sharing.pull
    moved = move(Path("data/hidden_states/manifest.json"), folder, address, options)
    typer.echo(f"{way} {address}: {moved}")


def main() -> None:
    """Run the command line; an error that the user can mend is one line, never a traceback."""
    try:
        app()
    except (EyasError, OSError) as error:
        sys.exit(f"eyas: error: {error}")


if __name__ == "__main__":
    main()

"""A sweep's jobs: combinations of parameters, each run in a folder of its own beside the pipeline.

Reads: dvc.yaml, dvc.lock and the outs they name. Writes: var/sweeps/jobs/KEY (a job: links to what
the pipeline has made, and its own outs), var/sweeps/SWEEP (which jobs a sweep has). A job's KEY is
a hash of what DVC would look at: parameters, sources and data of the stages that it runs. So a
finished job is never run again, by whatever sweep, and a killed one goes on where it was.
"""

import contextlib
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from eyas.desk.digests import (
    LOCK,
    PIPELINE,
    folder_digest,
    git,
    locked_digests,
    read_state,
    read_yaml,
)
from eyas.desk.params import PARAMS_FILE, Params
from eyas.desk.results import ALL, read_results
from eyas.desk.workers import cpu_s
from eyas.errors import EyasError
from eyas.files import md5_of, read_json, write_json, write_text
from eyas.records import canonical_json
from eyas.settings import Runtime

FOLDER = Path("var/sweeps")
JOBS = FOLDER / "jobs"
FINISHED = "job.json"
_ALWAYS = ("train", "export", "evaluate")
_NEVER = ("compose", "report")
_CAP = "runtime.sweep."  # decides what a job may buy
_BESIDE = ("hydra.", "hydra/", "+hydra.", "runtime.", "select=", "-")  # they change no output
log = logging.getLogger("eyas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A stage of dvc.yaml, for one data set where it has one for each."""

    title: str  # stage or stage@dataset
    deps: tuple[str, ...]
    params: tuple[str, ...]
    outs: tuple[str, ...]  # metrics among them

    @property
    def metrics(self) -> Path:
        """Return the file of its metrics."""
        return Path("metrics") / f"{self.title.replace('@', '-')}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One combination."""

    key: str
    folder: Path
    tree: Mapping[str, Any]
    overrides: tuple[str, ...]
    run: tuple[Node, ...]
    links: tuple[str, ...]  # paths of the pipeline that it reads
    inputs: Mapping[str, str]  # of them, the outs: path -> DVC's digest


def read_nodes(datasets: Sequence[str]) -> list[Node]:
    """Return the stages of dvc.yaml in order, those for each data set spread out."""
    nodes: list[Node] = []
    for stage, block in read_yaml(PIPELINE).get("stages", {}).items():
        body = block.get("do", block)
        for dataset in datasets if "foreach" in block else [""]:
            deps, params, outs = (
                tuple(_name(e).replace("${key}", dataset) for k in kinds for e in body.get(k, ()))
                for kinds in (("deps",), ("params",), ("outs", "metrics"))
            )
            title = f"{stage}@{dataset}" if dataset else stage
            nodes.append(Node(title=title, deps=deps, params=params, outs=outs))
    return [node for node in nodes if node.title not in _NEVER]


def _name(entry: str | Mapping[str, Any]) -> str:
    return entry if isinstance(entry, str) else next(iter(entry))


def stale(nodes: Sequence[Node], tree: Mapping[str, Any]) -> list[Node]:
    """Return what a job runs: training and what follows, and what dvc.lock has for other values."""
    locked, params = read_yaml(LOCK).get("stages", {}), Params(tree)
    run: list[Node] = []
    for node in nodes:
        known = locked.get(node.title, {}).get("params", {}).get(PARAMS_FILE.name, {})
        fresh = node.title in locked and all(
            path in known and known[path] == params.value(path) for path in node.params
        )
        made = [out for other in run for out in other.outs]
        follows = any(_within(out, dep) for dep in node.deps for out in made)
        if node.title in _ALWAYS or follows or not fresh:
            run.append(node)
    return run


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/") or folder.startswith(f"{path}/")


def plan_job(tree: Mapping[str, Any], overrides: Sequence[str]) -> Job:
    """Return the job of a combination.

    Raises: EyasError if data is missing, or if it would buy answers and nothing caps that.
    """
    nodes = read_nodes(list(tree["datasets"]))
    run = stale(nodes, tree)
    tree = _capped(tree, [n.title for n in run])
    made = {out for node in run for out in node.outs}
    kept = [out for node in nodes if node not in run for out in node.outs]
    locked = locked_digests(LOCK)
    needed = {dep for node in run for dep in node.deps if not dep.startswith("src/")}
    inputs = {
        out: locked[out]
        for out in kept
        if out in locked and any(_within(out, dep) for dep in needed)
    }
    plain = {d for d in needed if not any(_within(out, d) for out in (*made, *kept))}
    if missing := [p for p in (*inputs, *plain) if not Path(p).exists()]:
        raise EyasError(f"{missing[0]}: no such file", hint="run `dvc repro` (or `dvc pull`) first")
    values = Params(tree)
    sources = {dep: _digest(dep) for n in run for dep in n.deps if dep.startswith("src/")}
    sources |= {path: _digest(path) for path in plain}
    named = {n.title: {p: values.value(p) for p in n.params} for n in run}
    key = md5_of(canonical_json([named, sources, inputs]))
    return Job(
        key=key[:12],
        folder=JOBS / key[:12],
        tree=tree,
        overrides=tuple(overrides),
        run=tuple(run),
        links=tuple(p for p in (*kept, *sorted(plain)) if Path(p).exists()),
        inputs=inputs,
    )


def _capped(tree: Mapping[str, Any], titles: Sequence[str]) -> dict[str, Any]:
    """Return the tree with runtime.sweep.budget_tokens on each data set that will be bought."""
    cap = Params(tree).knob("runtime", Runtime).sweep.budget_tokens
    datasets = dict(tree["datasets"])
    for name, dataset in datasets.items():
        if f"generate@{name}" not in titles or dataset["kind"] != "prompts":
            continue
        if cap is None:
            raise EyasError(
                f"sweep: this combination asks for new answers of '{name}', which may cost money",
                hint="cap it: runtime.sweep.budget_tokens=20000; or run `dvc repro` before, and "
                "sweep from the same experiment=",
            )
        own = dataset["generate"]["budget_tokens"]
        generate = dataset["generate"] | {"budget_tokens": min(own, cap) if own else cap}
        datasets[name] = dataset | {"generate": generate}
    return {**tree, "datasets": datasets}


def run_job(job: Job, work: Callable[[Node, Mapping[str, Any]], Any]) -> dict[str, Any]:
    """Return a job's record; the stages are run by `work` in its folder, unless they were before.

    Raises: EyasError if the pipeline's data changed meanwhile, or what a stage raises.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    with locked(job):
        if (job.folder / FINISHED).is_file():
            log.info("sweep: job %s is finished already", job.key)
            return read_json(job.folder / FINISHED)
        _lay_out(job)
        started_s, started_cpu_s = time.time(), cpu_s()
        tree = {**job.tree, "runtime": job.tree["runtime"] | {"store": _store(job)}}
        with contextlib.chdir(job.folder):
            for node in job.run:
                log.info("sweep: job %s: %s", job.key, node.title)
                report = work(node, tree | {"select": node.title.partition("@")[2] or None})
                write_json(node.metrics, dict(report.metrics))
        now = locked_digests(LOCK)
        if changed := [path for path, md5 in job.inputs.items() if now.get(path) != md5]:
            raise EyasError(f"{changed[0]}: has changed while job {job.key} read it; run it again")
        costs = {"wall_s": round(time.time() - started_s, 1), "started_s": started_s}
        found = _record(job) | costs | {"cpu_s": round(cpu_s() - started_cpu_s, 1)}
        write_json(job.folder / FINISHED, found)
        return found


def locked(job: Job) -> FileLock:
    """Return the job's lock: a worker may have outlived its sweep, and still be at work."""
    return FileLock(job.folder.with_suffix(".lock"))


def _lay_out(job: Job) -> None:
    for path in job.links:
        link = job.folder / path
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(Path(path).resolve())
    cache = Path("var/cache").resolve()
    if cache.is_dir() and not (job.folder / "var/cache").exists():
        (job.folder / "var").mkdir(exist_ok=True)
        (job.folder / "var/cache").symlink_to(cache)
    write_text(job.folder / PARAMS_FILE, yaml.safe_dump(dict(job.tree), sort_keys=False))


def _store(job: Job) -> str:
    """Return where the hidden states lie: the pipeline's, or its own if the job makes them."""
    own = any(node.title == "extract" for node in job.run)
    return "var/states" if own else str(Path(job.tree["runtime"]["store"]).resolve())


def _record(job: Job) -> dict[str, Any]:
    """Return what a finished job is and gave."""
    results = read_results(job.folder, job.tree["merge"]["sources"])
    row, state = results.row("trained", ALL), read_state(job.tree)
    bought = [n.metrics for n in job.run if n.title.startswith("generate@")]
    costs = [read_json(job.folder / path)["cost_usd"] for path in bought]
    return {
        "key": job.key,
        "overrides": list(job.overrides),
        "promote": promote_line(job.overrides),
        "ran": [node.title for node in job.run],
        "inputs": dict(job.inputs),
        "commit": state.commit,
        "dirty": state.dirty,
        "params_md5": state.digest,
        "dvc_lock_md5": _digest(str(LOCK)),
        "cost_usd": round(sum(costs), 9),
        "draft_steps": results.headline_steps,
        **{name: round(row[name], 4) for name in ("tau", "tau_low", "tau_high") if row},
    }


def told(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that change an output."""
    return [o for o in overrides if o.startswith(_CAP) or not o.startswith(_BESIDE)]


def promote_line(overrides: Sequence[str]) -> str:
    """Return the command that makes a combination the pipeline's own."""
    return " ".join(["dvc exp run", *(f"-S {shlex.quote(o)}" for o in told(overrides))])


def folder_of(arguments: Sequence[str]) -> Path:
    """Return the folder of a sweep: the same arguments on the same state have the same one."""
    lock = _digest(str(LOCK)) if LOCK.is_file() else ""
    asked = canonical_json([sorted(told(arguments)), git("rev-parse", "HEAD"), lock])
    return FOLDER / md5_of(asked)[:8]


def read_jobs(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a sweep's jobs, best first; those that failed come last."""
    found = [read_json(path) for path in folder.glob(f"*/{FINISHED}")]
    unique = {str(job["overrides"]): job for job in found}.values()
    return sorted(unique, key=lambda job: (-job.get("tau", 0.0), job["overrides"]))


def render(name: str, jobs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a sweep's table: acceptance length, its interval, time, combination."""
    done, failed = [j for j in jobs if "tau" in j], [j for j in jobs if "tau" not in j]
    steps = {job["draft_steps"] for job in done}
    how = f", K={steps.pop()}, bonus counted" if len(steps) == 1 else ""
    yield f"Sweep {name}: {len(done)} of {len(jobs)} jobs, by acceptance length{how}"
    common = set.intersection(*(set(told(j["overrides"])) for j in jobs)) if jobs[1:] else set()
    if common:
        yield f"all with {' '.join(o for o in told(jobs[0]['overrides']) if o in common)}"
    yield ""
    yield "  #  length  95 % interval    CPU s      USD  combination"
    for place, job in enumerate(done, start=1):
        interval = f"{job['tau_low']:.2f} to {job['tau_high']:.2f}"
        yield (
            f"{place:3}  {job['tau']:6.2f}  {interval:<13}  {job['cpu_s']:7.0f}"
            f"  {job['cost_usd']:7.4f}  {_words(job, common)}"
        )
    for job in failed:
        yield f"  -  failed  {_words(job, common)}: {job['error'].splitlines()[0]}"
    yield ""
    for place, job in enumerate(done, start=1):
        yield f"{place:3}  {job['promote']}"


def _words(job: Mapping[str, Any], common: set[str]) -> str:
    return " ".join(o for o in told(job["overrides"]) if o not in common) or "(as configured)"


def _digest(path: str) -> str:
    base = Path(path)
    return md5_of(base.read_bytes()) if base.is_file() else folder_digest(base)

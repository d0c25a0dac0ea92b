"""The house rules of docs/contracts.md, read from the source with `ast`."""

import ast
import re
from pathlib import Path

import pytest
import yaml

SRC = Path("src/eyas")
WINGS = {"prompts", "generation", "tokens", "states", "drafter"}
FLOOR = {"errors", "records", "files", "parquet", "settings", "status"}
MODULES = sorted(SRC.rglob("*.py"))
ONLY_HERE = {"mlflow": {"desk/tracking.py", "desk/registry.py"}, "httpx": {"generation/client.py"}}
TORCH_ROOMS = {"states", "drafter"}
STAGES = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]


def imports_of(path: Path) -> set[str]:
    """Return the dotted names a module imports, at the top or inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(path: Path) -> str:
    """Return the wing, `desk`, `stages`, or the floor module's own name."""
    relative = path.relative_to(SRC)
    return relative.parts[0].removesuffix(".py")


def eyas_rooms(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports_of(path) if name.startswith("eyas.")}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_run_from_stages_to_desk_to_wings_to_floor(path: Path) -> None:
    room, used = room_of(path), eyas_rooms(path)
    allowed = {
        "cli": {"desk", "states"} | FLOOR,
        "stages": {"desk"} | WINGS | FLOOR,
        "desk": {"desk"} | WINGS | FLOOR,
        **{wing: {wing} | FLOOR for wing in WINGS},
        **dict.fromkeys(FLOOR, FLOOR),
    }.get(room, set())
    assert used <= allowed, f"{path} imports {sorted(used - allowed)}"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_outside_packages_are_imported_in_their_room_only(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(path)}
    relative = path.relative_to(SRC).as_posix()
    for package, rooms in ONLY_HERE.items():
        assert package not in roots or relative in rooms, f"{path} imports {package}"
    assert "torch" not in roots or room_of(path) in TORCH_ROOMS | {"stages"}, (
        f"{path} imports torch"
    )


def wing_modules_of(stage: str) -> set[Path]:
    """Return the wing modules that a stage imports, at any depth inside the wings."""
    found, waiting = set[Path](), [SRC / "stages" / f"{stage}.py"]
    while waiting:
        for name in imports_of(waiting.pop()):
            base = Path("src", *name.split("."))
            module, inside = base.with_suffix(".py"), base.parent.with_suffix(".py")
            for path in (module, inside, base / "__init__.py", base.parent / "__init__.py"):
                if path.is_file() and room_of(path) in WINGS and path not in found:
                    found.add(path)
                    waiting.append(path)
    return {p for p in found if p.name != "__init__.py"}


@pytest.mark.parametrize("stage", sorted(set(STAGES) - {"compose"}))
def test_dvc_watches_exactly_the_wing_modules_that_a_stage_imports(stage: str) -> None:
    deps = map(Path, STAGES[stage].get("do", STAGES[stage])["deps"])
    files = [f for dep in deps for f in ([dep] if dep.is_file() else dep.rglob("*.py"))]
    watched = {f for f in files if f.is_relative_to(SRC) and room_of(f) in WINGS}
    assert {f for f in watched if f.name != "__init__.py"} == wing_modules_of(stage)


def test_every_stage_of_the_pipeline_has_its_module() -> None:
    modules = {p.stem for p in (SRC / "stages").glob("*.py")} - {"__init__", "sweep"}
    assert set(STAGES) == modules


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 350, f"{path} is too long"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{path}:{node.lineno} {node.name} has {length} lines"


def test_the_whole_source_stays_within_its_budget() -> None:
    assert sum(p.read_text(encoding="utf-8").count("\n") for p in MODULES) <= 26_100


def test_locks_name_no_host_and_no_cuda() -> None:
    for lock in Path("requirements").glob("*.lock"):
        text = lock.read_text(encoding="utf-8")
        assert "://" not in text, lock
        assert "nvidia" not in text, lock
        assert not any(line.startswith("torch==") for line in text.splitlines()), lock


@pytest.mark.parametrize("name", ["s3", "dev", "bench"])
def test_a_larger_environment_changes_nothing_of_the_run(name: str) -> None:
    pin = re.compile(r"^[\w.-]+(?:\[.*\])?==\S+", re.MULTILINE)
    locks = (Path(f"requirements/{lock}.lock") for lock in ("base", name))
    base, larger = (set(pin.findall(lock.read_text(encoding="utf-8"))) for lock in locks)
    assert len(base) > 100
    assert base <= larger

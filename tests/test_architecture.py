"""Imports run one way, heavy libraries have doors, inside is relative: held by reading every file's imports."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

from leeway.config import bundled_recipes

ROOT = Path(__file__).resolve().parents[1]
COMPONENTS = ROOT / "components"

LAYERS = [
    {"types", "samples", "sampling_masks", "group", "train_batch", "versions", "weights"}
    | {"failures", "garbage", "integrity", "redaction", "section", "importing", "lazy", "shared_rows", "spans"},
    {"algorithms"},
    {"config", "monitor"},
    {"tasks", "envs", "transports"},
    {"jobs"},
    {"experiences"},
    {"collector", "replay", "param_server", "trainer"},
    {"runtime", "planning", "auxiliary", "engines", "serving"},
    {"driver"},
    {"studies", "watch", "elsewhere"},
    {"library"},
    {"studio"},
    {"recipes", "cli"},
]
MIDDLE = LAYERS[6]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}


def files() -> list[Path]:
    """Our own source."""
    return sorted([*COMPONENTS.rglob("*.py"), *(ROOT / "recipes").rglob("*.py")])


def part_of(file: Path) -> str:
    if file.is_relative_to(ROOT / "recipes"):
        return "recipes"
    return file.relative_to(COMPONENTS).parts[0].removesuffix(".py")


def package_of(file: Path) -> list[str]:
    if not file.is_relative_to(COMPONENTS):
        return ["leeway", *file.relative_to(ROOT).parent.parts]
    return ["leeway", *file.relative_to(COMPONENTS).parent.parts]


@cache
def tree_of(file: Path) -> ast.Module:
    """A finalizer that parses, run in between by the garbage collector, upsets CPython 3.11's parser: none is run."""
    text = file.read_text(encoding="utf-8")
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    """Every node of the file's tree. `ast.walk` asks each for all the fields that it may have: three times as slow."""
    nodes: list[ast.AST] = [tree_of(file)]
    for node in nodes:
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                nodes.append(value)
            elif isinstance(value, list):
                nodes += [item for item in value if isinstance(item, ast.AST)]
    return nodes


@cache
def imports(file: Path) -> list[tuple[int, str, int]]:
    """(line, absolute dotted module, relative level) of every import anywhere in the file."""
    found = []
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package_of(file)[: len(package_of(file)) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # `from .. import replay` names a part too
                found.append((node.lineno, f"{module}.{alias.name}", node.level))
    return found


def where(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


SOURCES = files()


def test_there_is_something_to_check() -> None:
    assert {"config", "cli", "types"} <= {part_of(f) for f in SOURCES}


def test_imports_run_one_way() -> None:
    for file in SOURCES:
        source = part_of(file)
        if source == "__init__":  # the public API names every part, lazily
            continue
        assert source in RANK, f"{file.relative_to(ROOT)}: {source} has no place in LAYERS"
        for line, module, _ in imports(file):
            names = module.split(".")
            if names[0] != "leeway" or len(names) < 2 or names[1] not in RANK or names[1] == source:
                continue
            target = names[1]
            assert RANK[target] <= RANK[source], f"{where(file, line)}: {source} must not import {target}"
            assert not {source, target} <= MIDDLE, f"{where(file, line)}: {source} and {target} never import each other"


def test_imports_inside_components_are_relative() -> None:
    for file in SOURCES:
        relative = not file.is_relative_to(ROOT / "recipes")
        for line, module, level in imports(file):
            first = module.split(".")[0]
            assert first not in ("components", "configs"), f"{where(file, line)}: nothing is named {first}"
            if relative:
                assert level or first != "leeway", f"{where(file, line)}: write a relative import"
            else:
                assert first != "recipes", f"{where(file, line)}: write leeway.recipes"


def test_a_run_knows_the_planner_by_its_closing_advice_alone() -> None:
    for file in SOURCES:
        if part_of(file) in ("planning", "cli"):
            continue
        for line, module, _ in imports(file):
            if module.startswith("leeway.planning"):
                assert module == "leeway.planning.advice.advice_after", f"{where(file, line)}: {module}"


RUNS_WHAT_IT_READS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
UNSAFE_CALLS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load"), ("yaml", "unsafe_load")}


def test_nothing_that_is_read_is_unpickled() -> None:
    """Files of others can run no code here. What crosses between a run's own processes is pickled by Ray and by torch's
    collectives, inside those libraries. Other systems' checkpoints go through torch's restricted reader, at one place.
    """
    restricted = []
    for file in SOURCES:
        for line, module, _ in imports(file):
            if module == "pickle.PickleBuffer":  # memory that is to stay out of a pickle: it reads nothing
                continue
            assert not RUNS_WHAT_IT_READS & {*module.split(".")}, f"{where(file, line)}: {module} runs what it reads"
            assert not module.startswith("torch.distributed.checkpoint"), (
                f"{where(file, line)}: its metadata is pickled"
            )
        calls = [node for node in nodes_of(file) if isinstance(node, ast.Call)]
        safe = {id(call.func) for call in calls if "weights_only=True" in map(ast.unparse, call.keywords)}
        for node in nodes_of(file):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                call = (node.value.id, node.attr)
                if call == ("torch", "load") and id(node) in safe:
                    restricted.append(where(file, node.lineno).partition(":")[0])
                    continue
                assert call not in UNSAFE_CALLS, f"{where(file, node.lineno)}: {'.'.join(call)} can run what it reads"
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                raise AssertionError(f"{where(file, node.value.lineno)}: allow_pickle")
    assert restricted == ["components/trainer/fsdp_files.py"]


DOORS = ("vllm", "ray", "wandb", "tensorboard", "mlflow", "trackio")


def may_import(file: Path, library: str) -> bool:
    part, name = part_of(file), file.name
    if library == "vllm":
        return part == "engines" and name.startswith("vllm")
    if library == "ray":
        return name in ("actor.py", "object_store.py") or part in ("runtime", "driver")
    if library in ("omegaconf", "yaml"):
        return part == "config" or (library, part, name) == ("yaml", "monitor", "metrics.py")  # the table of metrics
    return part == "monitor" and library in name  # wandb, tensorboard, mlflow, trackio: their own sink


def test_libraries_come_in_by_their_doors() -> None:
    for file in SOURCES:
        for line, module, level in imports(file):
            names = module.split(".")
            library = "tensorboard" if module.startswith("torch.utils.tensorboard") else names[0]
            if not level and library in (*DOORS, "omegaconf", "yaml"):
                assert may_import(file, library), f"{where(file, line)}: {library} does not belong here"


def test_what_the_tests_compare_with_is_never_imported() -> None:
    """TRL and what comes with it are dependencies of the tests alone, and of the one benchmark that runs it."""
    benchmarks = [file for file in (ROOT / "benchmarks").glob("*.py") if file.name != "peer_loops.py"]
    for file in [*SOURCES, *(ROOT / "examples").glob("*.py"), *benchmarks]:
        for line, module, level in imports(file):
            assert level or module.split(".")[0] not in ("trl", "accelerate"), (
                f"{where(file, line)}: not in the package"
            )


def loaded_with(file: Path, seen: set[Path]) -> set[str]:
    """Modules of others that importing `file` loads, itself or through ours; not what its functions import."""
    if file in seen:
        return set()
    seen.add(file)
    found = set()
    for line, module, _ in imports(file):
        if line not in when_loaded(file):
            continue
        if module.startswith("leeway."):
            found |= set().union(*(loaded_with(ours, seen) for ours in files_of(module)))
        else:
            found.add(module)
    return found


def when_loaded(file: Path) -> set[int]:
    """Lines of the statements at the top of the file."""
    return {node.lineno for node in tree_of(file).body}


def files_of(module: str) -> list[Path]:
    """`leeway.part.file.Name` -> that file."""
    names = module.split(".")[1:]
    base = ROOT if names[0] == "recipes" else COMPONENTS
    return [
        f for stop in (len(names), len(names) - 1) if (f := base.joinpath(*names[:stop]).with_suffix(".py")).is_file()
    ]


def test_the_parameter_server_loads_no_torch() -> None:
    """Buckets pass it by as references: it would only start later, and be larger."""
    loaded = loaded_with(COMPONENTS / "param_server/actor.py", set())
    assert "ray" in loaded, "the way into the actor was not found"
    assert not {module for module in loaded if module.split(".")[0] in ("torch", "tensordict", "numpy")}


def test_the_driver_of_a_run_loads_neither_vllm_nor_what_loads_it() -> None:
    """These and what loads them, a compiler, take seconds, for actors alone. Only `Rollouts` trains in the driver."""
    named = (module for _, module, _ in imports(COMPONENTS / "driver/__init__.py") if module.startswith("leeway."))
    named = (module for module in named if not module.startswith("leeway.driver.rollouts"))
    offered = {file for module in named for file in files_of(module)}
    loaded = set().union(*(loaded_with(file, set()) for file in offered))
    assert any(module.startswith("ray") for module in loaded), "the way to the actors was not found"
    heavy = ("vllm", "torchrl", "tensordict", "transformers")
    assert not {module for module in loaded if module.split(".")[0] in heavy}


def test_a_recipe_is_asked_for_its_needs_without_loading_torch_or_ray() -> None:
    for recipe in bundled_recipes():
        loaded = {module.split(".")[0] for module in loaded_with(ROOT / f"recipes/{recipe}.py", set())}
        assert not loaded & {"torch", "ray", "vllm", "transformers", "torchrl", "tensordict", "matplotlib"}, recipe

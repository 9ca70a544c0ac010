"""What may import what: the mathematics no network, and the library no experiments."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"


def module(path: Path) -> str:
    name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module(path): path for path in SOURCE.rglob("*.py")}


def imports(name: str) -> set[str]:
    """Modules of ours that it imports anywhere, be it in a function."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys()


def needs(name: str) -> set[str]:
    """What it imports, and what that imports."""
    seen, new = set(), {name}
    while new:
        seen |= new
        new = set().union(*(imports(one) for one in new)) - seen - {"vmd"}  # the package imports names as they are used
    return seen


@pytest.mark.parametrize("name", ["masking", "latent", "objective", "likelihood", "sampling"])
def test_the_mathematics_imports_no_network(name):
    assert needs(f"vmd.{name}").isdisjoint({"vmd.network", "vmd.model", "vmd.predictor", "vmd.training", "vmd.attention"})


def test_the_library_imports_no_experiments():
    """But for commands, which run them."""
    library = [name for name in MODULES if not name.startswith(("vmd.experiments", "vmd.commands"))]
    assert len(library) > 40
    assert not [name for name in library if any(used.startswith("vmd.experiments") for used in imports(name))]

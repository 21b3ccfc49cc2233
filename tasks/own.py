"""A task file of your own as a module: where Python finds it, and where its imports come from.

The file becomes the module `tasks.own_<digest of its folder>.<its name>`. What it imports is looked for in its own
folder first, as for a script, whatever else has that name. The modules found there get names below `tasks.own_...` too.
So they never meet modules of ours, or of a library, with the same name. A process that the task starts finds them by
these names, because it gets our `sys.path`: the folder is an entry there.
"""

import builtins
import hashlib
import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "tasks.own_"
DOT = "\u2024"  # stands for a dot in a file's name, which no module's name can have
_seen: dict[str, tuple] = {}  # module -> its file as it was loaded: when it was changed, its size


def load(path: Path) -> ModuleType:
    """The module of a task file; it is run again only when it or a file beside it has changed.

    Raises:
        BaseException: whatever the file raises.
    """
    for folder in (path.parent, _root(path.parent)):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    top = f"{PREFIX}{_digest(path.parent)}"
    ours = {name: module for name, module in sys.modules.items() if name == top or name.startswith(top + ".")}
    if any(_stamp(module.__file__) != _seen[name] for name, module in ours.items() if name in _seen):
        for name in ours:
            del sys.modules[name]
    importlib.invalidate_caches()
    return importlib.import_module(_name(path))


def _name(path: Path) -> str:
    """The module's name for a task file."""
    root, stem = _root(path.parent), path.stem
    inner = path.parent.relative_to(root).parts
    if root == ROOT:  # a file in a package of ours
        return ".".join((*inner, stem))
    if "." in stem or (path.parent / stem / "__init__.py").exists():  # the file is meant, not the package beside it
        stem = path.name.replace(".", DOT)
    parts = inner if stem == "__init__" else (*inner, stem)
    return ".".join((PREFIX + _digest(path.parent), *parts))


def _root(folder: Path) -> Path:
    """The folder that the outermost package around a folder lies in; the folder itself where it is no package."""
    while (folder / "__init__.py").exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _digest(folder: Path) -> str:
    return hashlib.sha256(str(folder).encode(errors="surrogateescape")).hexdigest()[:12]


def _stamp(file: str) -> tuple | None:
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _folder(module: str) -> Path | None:
    """The task's folder, from the name of a module: the entry of sys.path with its digest."""
    digest = module.removeprefix(PREFIX).partition(".")[0]
    return next((Path(entry) for entry in sys.path if entry and _digest(Path(entry)) == digest), None)


class Finder:
    """Finds the modules below `tasks.own_...`; one of Python's finders (sys.meta_path)."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(PREFIX):
            return None
        if "." not in name.removeprefix(PREFIX):
            folder = _folder(name)
            if folder is None:
                return None
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(_root(folder))]
            return spec
        last = name.rpartition(".")[2]
        if DOT in last:
            file = Path(list(path)[0]) / last.replace(DOT, ".")
            return importlib.util.spec_from_file_location(name, file, loader=Loader(name, str(file)))
        spec = PathFinder.find_spec(name, path)
        if spec and type(spec.loader) is SourceFileLoader:
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


class Loader(SourceFileLoader):
    """Runs a file whose import statements look beside the task first, those inside its functions too."""

    def exec_module(self, module: ModuleType) -> None:
        _seen[module.__name__] = _stamp(self.path)

        def find(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
            package = _package_with(name.partition(".")[0], module.__name__) if level == 0 else None
            if package is None:
                return builtins.__import__(name, globals, locals, fromlist, level)
            if fromlist:
                return builtins.__import__(f"{package}.{name}", None, None, fromlist, 0)
            importlib.import_module(f"{package}.{name}")
            return sys.modules[f"{package}.{name.partition('.')[0]}"]

        module.__dict__["__builtins__"] = vars(builtins) | {"__import__": find}
        super().exec_module(module)

    def path_stats(self, path: str) -> dict:
        """No cached bytecode: nothing is written into your folder, and a file changed within a second is seen."""
        raise OSError


def _package_with(top: str, importer: str) -> str | None:
    """The package below `tasks.own_...` that has a module `top` for the importing module; None: it lies elsewhere."""
    folder = _folder(importer)
    if folder is None:
        return None
    own = PREFIX + _digest(folder)
    root = _root(folder)
    beside = ".".join((own, *folder.relative_to(root).parts))
    for package, place in ((beside, folder), (own, root)):
        name = f"{package}.{top}"
        if name == importer or place == ROOT:  # `import random` in random.py means Python's
            continue
        spec = sys.modules[name].__spec__ if name in sys.modules else importlib.util.find_spec(name)
        if spec and (spec.origin or not _elsewhere(top)):
            return package
    return None


def _elsewhere(top: str) -> bool:
    """Whether Python or a library has a module of this name. A folder without __init__.py steps back then."""
    if top in sys.stdlib_module_names:
        return True
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec
        return True
    # an environment often lies in our folder: its libraries are none of ours
    return bool(spec and spec.origin and Path(spec.origin).parent not in (ROOT, ROOT / top))

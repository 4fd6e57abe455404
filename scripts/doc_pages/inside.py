"""Parts of pages about the package itself: its public names, its errors, its wire formats."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import hybridcomp
from hybridcomp import codecs, errors, nn, session

FORMATS = Path(hybridcomp.__file__).resolve().parent / "kernels" / "formats"
#: the first words of a header that holds the format of a codec; the others are shared parts
TITLE = re.compile(r"// (\w+): ")

#: what users hold, what layers of a model need, what authors of codecs and of engines need
PUBLIC = (("", hybridcomp), ("nn.", nn), ("codecs.", codecs), ("session.", session))

#: methods of torch's protocols, which need no words
OF_TORCH = {"state_dict", "load_state_dict", "zero_grad", "forward"}
#: what users call of classes whose other methods are for hybridcomp's own parts
CALLED = {
    "Attached": {"detach", "on_detach", "take_events"},
    "CompressionConfig": {"parse"},
    "CachedEmbedding": {
        "from_embedding", "prefetch", "figures", "save", "load", "full_weight"
    },
}  # fmt: skip


def api() -> str:
    """Return every public name of ``PUBLIC``; errors have a table.

    What users hold has its signature and docstring, what authors need a line, a codec its name:
    ``help`` has the rest.
    """
    entries, names, rows = [], [], []
    for name, found in public():
        if inspect.isclass(found) and issubclass(found, codecs.Codec) and found is not codecs.Codec:
            names.append(f"`{name.removeprefix('codecs.')}`")
        elif name.startswith(("codecs.", "session.")):
            rows.append(f"* `hybridcomp.{name}`: {_first(found)}")
        else:
            entries.append("\n".join(_entry(name, found)))
    head = (
        "## Codecs and engines\n\n`help(hybridcomp.codecs.Codec)` and so on have the contracts. "
        f"[Codecs](codecs.md) in `hybridcomp.codecs`: {', '.join(names)}."
    )
    return "\n\n".join([*entries, head, "\n".join(rows)])


def _first(found: object) -> str:
    """Return the first paragraph of a docstring, in one line."""
    first = (inspect.getdoc(found) or "").partition("\n\n")[0]
    return " ".join(first.replace("``", "`").split()).replace("|", "\\|")


def public() -> Iterator[tuple[str, object]]:
    """Yield name and object of every public function and class but errors."""
    for prefix, module in PUBLIC:
        for name in module.__all__:
            found = getattr(module, name)
            if callable(found) and not (
                inspect.isclass(found) and issubclass(found, errors.HybridcompError)
            ):
                yield f"{prefix}{name}", found


def _entry(name: str, found: object) -> Iterator[str]:
    yield f"## `hybridcomp.{name}`"
    yield ""
    if inspect.isfunction(found):
        yield "```python"
        yield f"{name.rpartition('.')[2]}{_signature(found)}"
        yield "```"
        yield ""
    yield _markdown(inspect.getdoc(found) or "")
    if inspect.isclass(found) and (rows := list(_methods(found))):
        yield from ("", *rows)


def _signature(function: Callable[..., object]) -> str:
    """Return names, defaults and the result; the list of arguments below has the types."""
    whole = inspect.signature(function)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in whole.parameters.values()]
    return str(whole.replace(parameters=bare)).replace("'", "")  # annotations are strings


def _methods(found: type) -> Iterator[str]:
    """Yield a line for each public method for users, with its first sentence."""
    for key, value in vars(found).items():
        function = getattr(value, "__func__", value)
        told = key in CALLED.get(found.__name__, (key,)) and key not in OF_TORCH
        told = told and not key.startswith("_")
        if told and inspect.isfunction(function) and _ours(function):
            yield f"* `{key}`: {_first(function)}"


def _ours(function: object) -> bool:
    """Return whether hybridcomp defines ``function``, and not pydantic."""
    return str(getattr(function, "__module__", "")).startswith("hybridcomp")


def _markdown(doc: str) -> str:
    """Return a docstring as Markdown: its list of arguments becomes a list."""
    lines: list[str] = []
    inside = False
    for line in doc.replace("``", "`").splitlines():
        if line.strip() in ("Args:", "Raises:"):
            lines += ["", f"{line.strip()}", ""]
            inside = True
        elif inside and line.startswith("    ") and not line.startswith("        "):
            name, colon, rest = line.strip().partition(":")
            lines.append(f"* `{name}`{colon}{rest}")
        elif inside and line.startswith("        "):
            lines.append(f"  {line.strip()}")
        else:
            inside = inside and not line.strip()
            lines.append(line)
    return "\n".join(lines).strip()


def error_classes() -> str:
    """Return a line for each error that hybridcomp raises on purpose."""
    rows = []
    for name, found in vars(errors).items():
        if inspect.isclass(found) and issubclass(found, errors.HybridcompError):
            bases = [base.__name__ for base in found.__bases__ if base.__module__ == "builtins"]
            rows.append(f"* `{name}` (a `{', '.join(bases)}`): {_first(found)}")
    return "\n".join(rows)


def formats() -> str:
    """Return a row for each header of a format: the codec, its first sentence, the file."""
    rows = ["| codec | a payload | header below `hybridcomp/kernels/formats/` |", "|---|---|---|"]
    for path in sorted(FORMATS.glob("*.h")):
        lines = path.read_text("utf-8").splitlines()
        if (title := TITLE.match(lines[0])) is None:
            continue
        top = " ".join(line.removeprefix("//").strip() for line in takewhile(_comment, lines))
        first = re.split(r"(?<=[a-z)\d])\. |  ", top.partition(": ")[2])[0].rstrip(".")
        rows.append(f"| `{title[1]}` | {first.replace('|', chr(92) + '|')} | `{path.name}` |")
    return "\n".join(rows)


def _comment(line: str) -> bool:
    return line.startswith("//") and line != "//"

#!/usr/bin/env python3
"""Convert text files to Megatron's .bin/.idx: token = byte, 256 = end of a document.

With --vocabulary N it trains a byte-level BPE of N - 1 entries on the same text (needs the package
tokenizers); N - 1 is then the end of a document.

Without arguments it reads the source of the interpreter's standard library, which every machine
has. Files are sorted, shuffled with a fixed seed and split by document, so the same files give the
same dataset. Writes PREFIX_train.bin/.idx and PREFIX_valid.bin/.idx; gpt/indexed.py describes the
format.
"""

from __future__ import annotations

import argparse
import glob
import os
import random
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from gpt.indexed import DatasetError, IndexedWriter, Tokens

END_OF_DOCUMENT = 256
#: folders of the standard library with tests or third-party code
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def standard_library() -> list[Path]:
    """Return the .py files of the interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        Path(folder, name)
        for folder, folders, names in os.walk(root)
        if _keep_folders(folders, NOT_LIBRARY)
        for name in names
        if name.endswith(".py")
    ]
    if not found:
        raise DatasetError(f"{root}: found no .py files here; name text files or folders instead")
    return sorted(found)


def collect(inputs: Sequence[str], suffix: str) -> tuple[list[Path], set[Path]]:
    """Return the sorted files of ``inputs`` (files, folders, globs), and the inputs that are files.

    A folder stands for all non-hidden files below it that end with ``suffix``. Raises DatasetError
    for an input that matches nothing.
    """
    files: set[Path] = set()
    named: set[Path] = set()
    for text in inputs:
        matches = (
            [Path(text)] if os.path.exists(text) else map(Path, glob.glob(text, recursive=True))
        )
        found = [file for match in matches for file in _files_of(match, suffix)]
        if not found:
            raise DatasetError(
                f"{text}: expected a text file, a folder or a glob, found no file"
                f"{f' ending with {suffix!r}' if suffix else ''}; check the name"
            )
        files.update(found)
        if os.path.isfile(text):
            named.update(found)
    return sorted(files), named


def _files_of(path: Path, suffix: str) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, folders, names in os.walk(path):
        _keep_folders(folders, {"__pycache__"})
        yield from (Path(folder, n) for n in names if n.endswith(suffix) and not n.startswith("."))


def _keep_folders(folders: list[str], unwanted: set[str]) -> bool:
    """Remove hidden and unwanted folders from those that os.walk enters next; always true."""
    folders[:] = sorted(f for f in folders if f not in unwanted and not f.startswith("."))
    return True


def text_of(path: Path) -> bytes | None:
    """Return the bytes of a UTF-8 text file; None for other files."""
    content = path.read_bytes()
    if b"\x00" in content:
        return None
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return content


def encode(content: bytes) -> Tokens:
    """Return a document's uint16 tokens: its bytes, then END_OF_DOCUMENT."""
    tokens = np.empty(len(content) + 1, dtype=np.uint16)
    tokens[:-1] = np.frombuffer(content, dtype=np.uint8)
    tokens[-1] = END_OF_DOCUMENT
    return tokens


def read_documents(
    files: Sequence[Path], named: set[Path], max_bytes: int
) -> tuple[list[bytes], list[Path]]:
    """Read ``files`` in order up to ``max_bytes`` bytes of text; return texts and skipped files.

    Skips empty files and, in folders, files that are not text. Raises DatasetError if an explicitly
    named file is not text.
    """
    documents: list[bytes] = []
    left_out: list[Path] = []
    total, shown = 0, time.monotonic()
    for number, path in enumerate(files, 1):
        content = text_of(path)
        if content is None and path in named:
            raise DatasetError(f"{path}: expected UTF-8 text, found binary data; leave it out")
        if not content:
            left_out.append(path)
            continue
        content = content[: max_bytes - total]
        documents.append(content)
        total += len(content)
        if time.monotonic() - shown > 1 or total >= max_bytes or number == len(files):
            shown = time.monotonic()
            print(f"  {number} of {len(files)} files, {total / 1e6:.1f} MB", flush=True)
        if total >= max_bytes:
            print(f"  --max-bytes is reached: {len(files) - number} files are left out")
            break
    return documents, left_out


def encode_bpe(documents: Sequence[bytes], vocabulary: int) -> list[Tokens]:
    """Return uint16 tokens of documents, each ending with ``vocabulary - 1``.

    Raises DatasetError without the package, for an invalid size, and if too few pairs occur twice
    in the text.
    """
    if not 257 < vocabulary <= 65536:
        raise DatasetError(f"--vocabulary: expected 258 to 65536, found {vocabulary}")
    try:
        import tokenizers
    except ImportError:
        raise DatasetError("--vocabulary needs a package: pip install tokenizers") from None
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary - 1, show_progress=False, min_frequency=2,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    texts = [content.decode("utf-8", errors="ignore") for content in documents]
    bpe.train_from_iterator(texts, trainer)
    found = bpe.get_vocab_size()
    if found < vocabulary - 1:
        raise DatasetError(
            f"--vocabulary {vocabulary}: the text gives {found + 1}; add text or ask for fewer"
        )
    return [
        np.array([*each.ids, vocabulary - 1], dtype=np.uint16) for each in bpe.encode_batch(texts)
    ]


def split(documents: Sequence[Tokens], fraction: float) -> tuple[list[Tokens], list[Tokens]]:
    """Split into train and validation documents, at least one each.

    Validation gets about ``fraction`` of the tokens. A single document is cut in two.
    """
    if len(documents) == 1:
        length = len(documents[0])
        cut = min(length - 1, max(1, round(length * (1 - fraction))))
        return [documents[0][:cut]], [documents[0][cut:]]
    wanted = fraction * sum(map(len, documents))
    count, tokens = 0, 0
    while count < len(documents) - 1 and (count == 0 or tokens < wanted):
        tokens += len(documents[count])
        count += 1
    return list(documents[count:]), list(documents[:count])


def write(prefix: Path, documents: Sequence[Tokens]) -> int:
    """Write a dataset; return its number of tokens."""
    with IndexedWriter(prefix) as writer:
        for document in documents:
            writer.add(document)
        return writer.num_tokens


def prepare(arguments: argparse.Namespace) -> None:
    """Collect, shuffle, read, split, write."""
    start = time.monotonic()
    if arguments.inputs:
        files, named = collect(arguments.inputs, arguments.suffix)
    else:
        files, named = standard_library(), set()
    random.Random(arguments.seed).shuffle(files)
    print(f"reading up to {arguments.max_bytes / 1e6:g} MB of {len(files)} files", flush=True)
    contents, left_out = read_documents(files, named, arguments.max_bytes)
    if arguments.vocabulary:
        documents = encode_bpe(contents, arguments.vocabulary)
    else:
        documents = [encode(content) for content in contents]
    if left_out:
        few = ", ".join(str(path) for path in left_out[:3])
        print(
            f"left out {len(left_out)} empty or binary files: {few}{', ...' * (len(left_out) > 3)}"
        )
    if sum(map(len, documents)) < 2:
        raise DatasetError("expected text, found none in the files given; name others")
    parts = zip(("train", "valid"), split(documents, arguments.valid_fraction), strict=True)
    for name, part in parts:
        prefix = arguments.output.with_name(f"{arguments.output.name}_{name}")
        tokens = write(prefix, part)
        print(f"{prefix}.bin/.idx: {len(part)} documents, {tokens / 1e6:.3f} M tokens")
    print(f"done in {time.monotonic() - start:.1f} s", flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="*", help="text files, folders or globs")
    parser.add_argument("--output", type=Path, default=Path("data/text"), metavar="PREFIX")
    parser.add_argument("--suffix", default="", help="of a folder, only files that end with this")
    parser.add_argument("--max-bytes", type=int, default=16_000_000, metavar="N")
    parser.add_argument("--valid-fraction", type=float, default=0.02, metavar="F")
    parser.add_argument("--seed", type=int, default=0, help="of the order of documents")
    parser.add_argument("--vocabulary", type=int, metavar="N", help="of a BPE; default: bytes")
    found = parser.parse_args(arguments)
    if found.max_bytes < 2:
        parser.error(f"--max-bytes: expected at least 2, found {found.max_bytes}")
    if not 0 < found.valid_fraction < 1:
        parser.error(f"--valid-fraction: expected between 0 and 1, found {found.valid_fraction}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the data set; return the exit status."""
    try:
        prepare(parse(arguments))
    except (DatasetError, OSError) as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

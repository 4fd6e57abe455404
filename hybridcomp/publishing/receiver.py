"""Receive published weights: check a version as a whole, then apply it to a mirror on the host."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.errors import ConfigError, PublishError
from hybridcomp.escaping import one_line, quoted_path
from hybridcomp.job.waits import Notices
from hybridcomp.log import say
from hybridcomp.publishing.applied import AppliedChanges, AppliedVersion
from hybridcomp.publishing.destinations import folder_of
from hybridcomp.publishing.groups import GroupSource
from hybridcomp.publishing.mirror import CheckedVersion, Mirror, stage
from hybridcomp.publishing.quantized import unpacked
from hybridcomp.publishing.records import DamagedVersion, Manifest, table_digest
from hybridcomp.publishing.socket_stream import TwoWay, is_plain_socket
from hybridcomp.publishing.sources import FolderSource, Offer, Source
from hybridcomp.publishing.stream_sources import StreamSource
from hybridcomp.publishing.weights import FP32, PATTERNS, Table


class WeightReceiver:
    """A mirror of published weights that is updated from a source.

    It applies a version completely or not at all. Parameters have the trained model's Hugging Face
    names; a tied parameter appears once, and ``aliases`` has its other names.
    """

    def __init__(
        self, source: Any, *, device: torch.device | str = "cpu", weights: int | None = None
    ) -> None:
        """Hold the source; nothing is read before ``update``.

        Args:
            source: a folder (``file://`` URL or path), a connected socket, a stream with ``read``,
                or a process group of torch.distributed that the sender's first rank belongs to.
            device: device of the tensors that ``tensors`` and ``changed_values`` return. The mirror
                itself is on the host, so tensors on another device are copies.
            weights: upper limit on the number of weights. A first version with more weights is
                refused, and on a stream or group also one with more bytes than so many weights can
                take. None: as many as fit this host's memory. Later versions must have as many
                weights as the first.
        """
        if weights is not None and weights < 1:
            raise ConfigError("WeightReceiver.weights", weights, "expected a number of 1 or more")
        self._source, self._most = _source_of(source, weights), weights
        self._device = torch.device(device)
        self._mirror: Mirror | None = None
        self._held: Manifest | None = None
        self._last = AppliedChanges(is_told=True)  # changes that changed_values returns
        self._notices: Notices | None = None

    @property
    def version(self) -> int:
        """Return the version of the mirror; 0 before the first."""
        return 0 if self._held is None else self._held.version

    @property
    def base(self) -> str:
        """Return the identity of the chain; "" before the first version."""
        return "" if self._held is None else self._held.base

    @property
    def waits_for(self) -> str:
        """Return, in words, what the receiver waits for and since when; "" if nothing."""
        return self._source.waits_for()

    @property
    def aliases(self) -> Mapping[str, str]:
        """Return each further name of a tied parameter -> the name that ``tensors`` yields."""
        return {} if self._mirror is None else dict(self._mirror.aliases)

    def update(self, until: int | None = None) -> AppliedVersion | None:
        """Apply all available versions; return None if there is no new one.

        ``until``: the last version to apply from a folder, for receivers of one engine that must
        all hold the same version while newer ones arrive.

        A stream and a process group offer one version at a time: the call waits for it, and
        returns None at the end of the stream.

        Raises PublishError, in one line with version, tensor and what to do; the mirror then still
        holds ``version`` completely, and the call may be repeated. If a later full version would
        help, the sender has already been asked for one, and the error says to call again. Versions
        applied before an error belong to the next result.
        """
        begun = time.perf_counter()
        while True:
            try:
                self._take(until)
                break
            except DamagedVersion as error:
                if not self._source.turns_to_full(self._held, until):
                    raise DamagedVersion(f"{error}; {self._source.ask(self._held)}") from None
                say(f"receiver: {error}; a full version after it is taken instead", anywhere=True)
        taken = self._last
        if taken.is_told or not taken.count or self._held is None or self._mirror is None:
            self._say_if_empty()
            return None
        applied = taken.result(self._held, self._mirror.table, time.perf_counter() - begun)
        taken.is_told = True
        return applied

    def _say_if_empty(self) -> None:
        """Tell the user of a folder in which no version has appeared for 10, 30, 90 s and so on."""
        self._notices = self._notices or Notices()  # counts from the first poll
        if self._held is None and isinstance(self._source, FolderSource) and self._notices.due():
            path, waited = self._source.path, self._notices.seconds
            there = (
                "" if path.is_dir() else "; the folder does not exist: correct its name, or wait"
            )
            say(
                f"receiver: no version in {quoted_path(path)} yet, after {waited:.0f} s{there}",
                anywhere=True,
            )

    def _take(self, until: int | None) -> None:
        """Apply the source's offers."""
        for offer in self._source.offers(self._held, until):
            checking = time.perf_counter()
            staged, apply_s = self._apply(offer)
            self._last.apply_s += apply_s
            self._last.check_s += time.perf_counter() - checking - apply_s
            self._source.applied(apply_s, staged.decode_s)

    def _apply(self, offer: Offer) -> tuple[CheckedVersion, float]:
        """Check an offer, then apply it; return its version, and the seconds of writing.

        Changes are recorded before they are written, and no version counts as held during writing.
        So after any error the record covers all changes of the mirror.
        """
        manifest = offer.manifest
        self._check(manifest)
        staged = stage(manifest, offer.parts(), self._mirror)
        begun = time.perf_counter()
        mirror = staged.fresh or self._mirror
        assert mirror is not None
        if self._last.is_told or staged.fresh is not None:
            self._last = AppliedChanges(self.version)
        self._last.note(staged)
        self._mirror = self._held = None
        for change in staged.changes:
            change.apply(mirror.flats[change.stretch.name])
        self._mirror, self._held = mirror, manifest
        return staged, time.perf_counter() - begun

    def _check(self, manifest: Manifest) -> None:
        """Raise PublishError unless the version follows the one held."""
        held, at = self._held, f"version {manifest.version}"
        if manifest.table is not None:
            found = table_digest(manifest.table, manifest.aliases)
            if found != manifest.table_digest:
                raise DamagedVersion(f"{at}: its table has another checksum; copy it again")
        if held is None:
            if not manifest.full:
                raise DamagedVersion(f"{at}: this receiver holds no version {manifest.parent}")
            count = sum(math.prod(shape) for shape, _ in (manifest.table or {}).values())
            if self._most is not None and count > self._most:
                raise PublishError(
                    f"{at}: expected {self._most} weights at most, found {count}: another model; "
                    "say to WeightReceiver how many weights the sender has"
                )
            return
        if manifest.base != held.base:
            raise PublishError(
                f"{at}: expected chain {held.base[:8]}, found {manifest.base[:8]}: another job "
                "writes here; make a new WeightReceiver to follow it"
            )
        if manifest.version <= held.version:
            raise PublishError(
                f"{at}: this receiver holds version {held.version} already: a replay; let the "
                "sender go on with newer versions"
            )
        parent = (manifest.parent, manifest.parent_digest)
        if not manifest.full and parent != (held.version, held.digest):
            raise DamagedVersion(
                f"{at}: it is made against version {manifest.parent}, this receiver holds version "
                f"{held.version}: a version is missing or was replaced"
            )
        if manifest.table_digest != held.table_digest:
            raise PublishError(f"{at}: {self._difference(manifest.table)}")

    def _difference(self, table: Table | None) -> str:
        """Name a parameter in which ``table`` differs from the mirror's."""
        assert self._mirror is not None
        todo = "make a new WeightReceiver for the new model"
        for name in sorted({*(table or {}), *self._mirror.table}) if table is not None else ():
            mine, theirs = self._mirror.table.get(name), (table or {}).get(name)
            if mine != theirs:
                what = f"expected {mine or 'nothing'}, found {theirs or 'nothing'}"
                return f"{one_line(name)}: {what}; {todo}"
        return f"it has other parameters than version {self.version}; {todo}"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and whole tensors of the held version: views of the mirror, for reading.

        The next update detects and refuses writes into them.
        """
        if self._mirror is None:
            return
        for name in self._mirror.table:
            yield name, self._mirror.shaped(name).to(self._device)

    def changed_values(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the last result's changes of a parameter: flat offsets (int64), new values.

        Both tensors are empty if nothing changed; the first version changes all values. After an
        update that raised, the tensors hold the changes since the last result. Raises PublishError
        for an unpublished name.
        """
        if self._mirror is None or name not in self._mirror.flats:
            todo = "expected a name that tensors() yields"
            raise PublishError(f"version {self.version}: {one_line(name)} is not published; {todo}")
        flat = self._mirror.flats[name]
        if self._last.is_new:
            where = torch.arange(flat.numel(), device="cpu")
        else:
            rows = [one.offsets() for one in self._last.changes.get(name, ())]
            where = (
                torch.unique(torch.cat(rows))
                if rows
                else torch.empty(0, dtype=torch.int64, device="cpu")
            )
        kind = self._mirror.table[name][1]
        if kind == FP32:
            where = torch.unique(where // 2)
            values = unpacked(flat.view(-1, 2)[where], kind)
        else:
            values = unpacked(flat[where], kind)
        return where.to(self._device), values.to(self._device)

    def check_engine(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raise PublishError if an engine's tensors cannot hold these weights unchanged.

        ``tensors``: the inference engine's tensors, by published names. Unpublished names, and
        shapes or dtypes that differ from the published ones, are refused.
        """
        if self._mirror is None:
            raise PublishError("version 0: nothing to compare with; call update before")
        for name, tensor in tensors:
            known = self._mirror.table.get(self._mirror.aliases.get(name, name))
            at = f"version {self.version}: {one_line(name)}"
            if known is None:
                raise PublishError(f"{at} is in the engine and not published; leave it out")
            shape, dtype = known
            if (
                tensor.dtype
                != unpacked(torch.empty(0, 2, dtype=PATTERNS[dtype], device="cpu"), dtype).dtype
            ):
                raise PublishError(
                    f"{at}: expected {dtype}, found {tensor.dtype} in the engine; load the engine "
                    "with 16-bit weights, or quantize again what changed_values returns"
                )
            if tuple(tensor.shape) != shape:
                raise PublishError(
                    f"{at}: expected shape {shape}, found {tuple(tensor.shape)} in the engine; "
                    "give its whole tensors, under the names of the checkpoint"
                )


def _source_of(source: Any, weights: int | None) -> Source:
    if isinstance(source, (str, Path)):
        return FolderSource(folder_of(source))
    if isinstance(source, dist.ProcessGroup):
        return GroupSource(source, weights)
    if is_plain_socket(source):
        return StreamSource(TwoWay(source), weights)
    if callable(getattr(source, "read", None)):
        return StreamSource(source, weights)
    todo = "expected a folder (file:///...), a socket, a stream with read(), or a process group"
    raise ConfigError("WeightReceiver.source", type(source).__name__, todo)

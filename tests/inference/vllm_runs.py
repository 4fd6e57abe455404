"""Run vLLM, offline and as a server, with published versions; print results as JSON.

``python -m tests.inference.vllm_runs offline|served FAMILY WORKERS VERSIONS FOLDER``. To read the
weights in use, each worker multiplies every matrix by the identity, which is exact.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

PROMPT = [7 * one % 480 + 5 for one in range(200)]
#: faults of versions: damaged in transit, late, of another model, sent while requests run
DAMAGED, LATE, OTHER, RUNNING = 5, 9, 13, 17
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
WAIT_S = 6.0


def digest(values: Tensor) -> str:
    """Return a checksum of 16-bit values; both zeros are equal, as multiplication makes them."""
    return hashlib.sha256(
        (values.detach().float() + 0.0).contiguous().numpy().tobytes()
    ).hexdigest()


class Probe:
    """Extension of a vLLM worker: ``--worker-extension-cls``."""

    def prepared(self) -> None:
        """Wait until background work has ended."""
        self.weight_transfer_engine._beside.end()  # type: ignore[attr-defined]

    def unknown(self) -> dict[str, str]:
        """Return the weights that are not written in place, and the reasons."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        found: dict[str, str] = engine._follower._engine._layout.unknown
        return found

    def held(self) -> dict[str, str]:
        """Return checksums of the weights in use, without experts."""
        found: dict[str, str] = {}
        for name, module in self.get_model().named_modules():  # type: ignore[attr-defined]
            weights = dict(module.named_parameters(recurse=False))
            if "w13_weight" in weights:
                continue
            found |= {f"{name}.{key}": digest(one) for key, one in weights.items() if one.numel()}
            if hasattr(module, "cpu_linear"):
                keys = ("input_size_per_partition", "input_size", "embedding_dim")
                size = next(getattr(module, key) for key in keys if hasattr(module, key))
                columns = module.quant_method.apply(module, torch.eye(size, dtype=torch.bfloat16))
                found[f"{name}.weight"] = digest(columns.t())
        return found


def made(family: str, vocabulary: int = 512) -> nn.Module:
    """Create a transformers model with random weights."""
    import transformers

    torch.manual_seed(vocabulary)
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "eos_token_id": None,
    }  # fmt: skip
    if family == "Qwen2":
        sizes["tie_word_embeddings"] = True
    if family == "Mixtral":
        sizes["num_local_experts"] = 4
    config = getattr(transformers, f"{family}Config")(**sizes)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():  # so that answers differ between versions
        for parameter in model.parameters():
            parameter.mul_(2 if parameter.ndim > 1 else 1)
    return model


def exported(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the model under its checkpoint names."""
    from transformers.core_model_loading import revert_weight_conversion

    state = dict(model.named_parameters())
    yield from revert_weight_conversion(model, state).items()


class Trained:
    """A training model with a publisher."""

    def __init__(self, family: str, to: Path, vocabulary: int = 512) -> None:
        from hybridcomp.inference.shares import Shares

        self.model, self.to = made(family, vocabulary), to
        self.shares = Shares("bf16", 0, 1)
        self.publisher: Any = None
        self.generator = torch.Generator().manual_seed(3)
        self.is_tied = family == "Qwen2"

    def publish(self) -> int:
        from hybridcomp.publishing import Publisher
        from hybridcomp.publishing.destinations import Folder

        self.shares.take(exported(self.model))
        self.publisher = self.publisher or Publisher(self.shares.weights(), Folder(self.to))
        return int(self.publisher.publish().version)

    @torch.no_grad()
    def step(self) -> None:
        for one in self.model.parameters():
            moved = torch.rand(one.shape, generator=self.generator) < 0.1
            one.add_((moved * 0.05).to(torch.bfloat16))

    @torch.no_grad()
    def answer(self) -> float:
        """Return the log probability of the likeliest token after the prompt."""
        logits = self.model(torch.tensor([PROMPT])).logits[0, -1]
        return float(torch.log_softmax(logits.float(), 0).max())

    def held(self, names: list[str], rank: int, count: int) -> dict[str, str]:
        """Return worker ``rank``'s weights: rows of most matrices, columns of a block's last."""
        whole = {name: one.detach() for name, one in exported(self.model)}
        if self.is_tied:
            whole["lm_head.weight"] = whole["model.embed_tokens.weight"]
        found = {}
        for name in names:
            pack = next((pack for pack in PACKED if pack in name), "")
            parts = [name.replace(pack, part) for part in PACKED[pack]] if pack else [name]
            across = 1 if "o_proj" in name or "down_proj" in name else 0
            is_whole = "norm" in name or ".gate." in name
            rows = []
            for part in parts:
                known = whole.get(part, whole.get(part.replace(".mlp.", ".block_sparse_moe.")))
                assert known is not None, part
                rows.append(known if is_whole else known.chunk(count, across)[rank])
            found[name] = digest(torch.cat(rows))
        return found


def differing(trained: Trained, told: list[dict[str, str]]) -> list[str]:
    """Return the workers' weights that differ from the trained ones."""
    assert all(len(one) > 10 for one in told)
    wanted = [trained.held(list(one), rank, len(told)) for rank, one in enumerate(told)]
    return [name for one, want in zip(told, wanted, strict=True) for name in one
            if one[name] != want[name]]  # fmt: skip


def engine_of(model: Path, workers: int) -> Any:
    """Create ``vllm.LLM`` for the model in a folder."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        model=str(model), skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=4,
        enforce_eager=True, tensor_parallel_size=workers, max_model_len=256,
        weight_transfer_config=WeightTransferConfig(backend="hybridcomp"),
        worker_extension_cls="tests.inference.vllm_runs.Probe",
    )  # fmt: skip


def offline(family: str, workers: int, versions: int, folder: Path) -> dict[str, Any]:
    """Load versions into ``vllm.LLM``, trying a missing version before the third.

    Compares the last answer with that of a new engine, which loads the weights from a checkpoint.
    """
    trained = Trained(family, folder / "weights")
    trained.model.save_pretrained(folder / "model")  # type: ignore[operator]
    llm = engine_of(folder / "model", workers)
    said = {"source": str(folder / "weights"), "wait_s": 0.5}
    llm.init_weight_transfer_engine({"init_info": said})

    def load(version: int, prepare: bool = False) -> str:
        try:
            llm.start_weight_update()
            message = {"version": version, "prepare": prepare}
            llm.update_weights({"update_info": message})
            llm.finish_weight_update()
        except Exception as error:
            with contextlib.suppress(Exception):  # workers that were not notified still wait in it
                llm.finish_weight_update()
            return str(error)
        llm.reset_prefix_cache()
        return ""

    found: dict[str, Any] = {"wrong": [], "off": [], "errors": [], "moved": []}
    before = 0.0
    for number in range(1, versions + 1):
        version = trained.publish()
        if number == 3:
            found["errors"].append(load(99))
            found["off"].append(abs(answer_of(llm) - before))
        if number % 2:
            load(version, prepare=True)
            answer_of(llm)
        assert not (problem := load(version)), problem
        found["wrong"] += differing(trained, llm.collective_rpc("held"))
        last = answer_of(llm)
        found["off"].append(abs(last - trained.answer()))
        found["moved"].append(abs(trained.answer() - before))
        before = trained.answer()
        if number == versions:
            trained.model.save_pretrained(folder / "last")  # type: ignore[operator]
        trained.step()
    found["unknown"] = llm.collective_rpc("unknown")
    llm.llm_engine.engine_core.shutdown()
    found["fresh"] = answer_of(engine_of(folder / "last", workers)) - last
    return found


def answer_of(llm: Any) -> float:
    """Return vLLM's ``Trained.answer``."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=1, detokenize=False)
    (out,) = llm.generate({"prompt_token_ids": PROMPT}, sampling, use_tqdm=False)
    return float(max(one.logprob for one in out.outputs[0].logprobs[0].values()))


class Server:
    """A vLLM server in a separate process, and requests to it."""

    def __init__(self, folder: Path, workers: int, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = (folder / "server.log").open("w")
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(folder / "model"), "--tokens-only", "--dtype", "bfloat16",
            "--enforce-eager", "--port", str(port),
            "--host", "127.0.0.1", "--max-model-len", "512", "--max-num-seqs", "8",
            "--tensor-parallel-size", str(workers),
            "--weight-transfer-config", '{"backend": "hybridcomp"}',
            "--worker-extension-cls", "tests.inference.vllm_runs.Probe",
        ]  # fmt: skip
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, env=environment
        )

    def wait(self) -> None:
        """Wait until it answers."""
        import requests

        while self.process.poll() is None:
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return
            except requests.RequestException:
                time.sleep(0.5)
        raise RuntimeError("the server has ended; see server.log")

    def ask(self, tokens: int, prompt: list[int], salt: str | None = None) -> dict[str, Any]:
        """Answer a prompt of token ids; a new ``salt`` bypasses the cache."""
        import requests

        body: Any = {
            "token_ids": prompt,
            "cache_salt": salt,
            "sampling_params": {"max_tokens": tokens, "temperature": 0, "logprobs": 1,
                                "detokenize": False, "ignore_eos": True},
            "stream": False,
        }  # fmt: skip
        answer = requests.post(f"{self.url}/inference/v1/generate", json=body, timeout=600)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()["choices"][0]
        return found

    def answer(self, salt: str | None = None) -> float:
        """Return the server's ``Trained.answer``."""
        (first, *_) = self.ask(1, PROMPT, salt)["logprobs"]["content"]
        return float(first["logprob"])

    def held(self) -> list[dict[str, str]]:
        """Return its workers' weights."""
        import requests

        body: Any = {"method": "held", "timeout": 120}
        answer = requests.post(f"{self.url}/collective_rpc", json=body, timeout=600)
        answer.raise_for_status()
        found: list[dict[str, str]] = answer.json()["results"]
        return found

    def end(self) -> None:
        """End the server."""
        self.process.terminate()
        self.process.wait()
        self.log.close()


def damage(folder: Path, version: int) -> None:
    """Flip a byte in the middle of a version's shard."""
    (part,) = (folder / "parts").glob(f"v{version:010d}.*.part")
    data = bytearray(part.read_bytes())
    data[len(data) // 3] ^= 255
    part.write_bytes(data)


def served(family: str, workers: int, versions: int, folder: Path) -> dict[str, Any]:
    """Send versions to a server through the trainer's engine, with faults on the way.

    ``stale``: after each version, differences between answers to a repeated prompt and to an
    uncached one; ``kept``: differences between answers before and after each rejected version.
    """
    from hybridcomp.inference import vllm_plugin

    vllm_plugin.register()
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from hybridcomp.errors import PublishError
    from hybridcomp.inference.vllm_trainer import HybridcompTrainerInfo, ServerClient
    from tests.scripts_on_ranks import free_port

    trained = Trained(family, folder / "weights")
    trained.model.save_pretrained(folder / "model")  # type: ignore[operator]
    server = Server(folder, workers, free_port())
    client = ServerClient(server.url)
    found: dict[str, Any] = {"wrong": [], "off": [], "errors": {}, "moved": [], "lost": 0}
    found |= {"stale": [], "kept": []}
    try:
        server.wait()
        trained.publish()
        other = Trained(family, folder / "other", vocabulary=480)
        other.publish()

        def transfer(of: Trained) -> Any:
            sending: Any = Sending(of)
            info = HybridcompTrainerInfo(
                publisher=sending, source=str(of.to), rank=0, wait_s=WAIT_S
            )
            return WeightTransferTrainerFactory.trainer_init(info, client=client)

        sender, before, last = transfer(trained), server.answer(), server.answer("first")
        for number in range(1, versions + 1):
            sender._publisher.number = number
            asked: list[threading.Thread] = []
            if number == OTHER:
                refused = transfer(other)
                with_error(refused.send_weights, found, number, PublishError)
                found["kept"].append(server.answer(f"refused {number}") - last)
                sender = transfer(trained)
                sender._publisher.number = number
            if number == RUNNING:
                asked = [threading.Thread(target=ask_long, args=(server, n, found))
                         for n in range(4)]  # fmt: skip
                for one in asked:
                    one.start()
                time.sleep(0.5)
                sender.prepare_weights()
            is_refused = with_error(sender.send_weights, found, number, PublishError)
            if is_refused:
                found["kept"].append(server.answer(f"refused {number}") - last)
                sender.send_weights()
            found["wrong"] += differing(trained, server.held())
            for one in asked:
                one.join()
            repeated, last = server.answer(), server.answer(f"version {number}")
            found["stale"].append(repeated - last)
            found["off"].append(abs(repeated - trained.answer()))
            found["moved"].append(abs(trained.answer() - before))
            before = trained.answer()
            trained.step()
    finally:
        server.end()
    return found


def with_error(call: Any, found: dict[str, Any], number: int, kind: type[Exception]) -> bool:
    """Call, and record the error."""
    try:
        call()
    except kind as error:
        found["errors"][number] = str(error)
        return True
    return False


def ask_long(server: Server, number: int, found: dict[str, Any]) -> None:
    """Request many tokens; count incomplete answers."""
    try:
        answer = server.ask(120, PROMPT[number:])
        found["lost"] += len(answer["token_ids"]) != 120
    except Exception as error:
        found["lost"] += 1
        found["errors"][f"request {number}"] = str(error)


class Sending:
    """A publisher that injects faults into versions."""

    def __init__(self, trained: Trained) -> None:
        self.trained, self.number = trained, 0
        self.ranks = (0,)
        self._mishaps = {DAMAGED, LATE}

    def finish(self) -> Any:
        """Apply the version that was prepared in the background."""
        return self.trained.publisher.finish()

    def publish(self, wait: bool = True) -> Any:
        """Publish; a damaged version is damaged once, a late one appears after a while."""
        publisher = self.trained.publisher
        assert publisher is not None
        if self.number == LATE and LATE in self._mishaps:
            self._mishaps.remove(LATE)
            self.trained.shares.take(exported(self.trained.model))
            threading.Timer(2.0, publisher.publish).start()
            return type("Told", (), {"version": publisher.version + 1})
        if not wait:
            self.trained.shares.take(exported(self.trained.model))
            return publisher.publish(wait=False)
        self.trained.publish()
        if self.number == DAMAGED and DAMAGED in self._mishaps:
            self._mishaps.remove(DAMAGED)
            damage(self.trained.to, publisher.version)
        return publisher.summary


def main() -> None:
    """Run as the command line says."""
    how, family, workers, versions, folder = sys.argv[1:6]
    place = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
    run = {"offline": offline, "served": served}[how]
    found = run(family, int(workers), int(versions), place)
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

"""List what the engines for vLLM call and override, with the signatures of ``VLLM``."""

from __future__ import annotations

from hybridcomp.inference.upstream import VLLM
from hybridcomp.seams.patching import Seam

BASE = "vllm.distributed.weight_transfer.base"
CLIENTS = "vllm.distributed.weight_transfer.clients"
LOADER = "vllm.model_executor.model_loader"

WORKER_SEAMS = (
    Seam(VLLM, BASE, "WeightTransferEngine.__init__",
         ("self", "config", "vllm_config", "device", "model")),
    Seam(VLLM, BASE, "WeightTransferEngine.init_transfer_engine", ("self", "init_info")),
    Seam(VLLM, BASE, "WeightTransferEngine.start_weight_update", ("self",)),
    Seam(VLLM, BASE, "WeightTransferEngine.update_weights", ("self", "update_info")),
    Seam(VLLM, BASE, "WeightTransferEngine.receive_weights", ("self", "update_info")),
    Seam(VLLM, BASE, "WeightTransferEngine.finish_weight_update", ("self",)),
    Seam(VLLM, BASE, "WeightTransferEngine.shutdown", ("self",)),
    Seam(VLLM, f"{LOADER}.reload", "initialize_layerwise_reload", ("model",)),
    Seam(VLLM, f"{LOADER}.reload.layerwise", "finalize_layerwise_processing",
         ("model", "model_config")),
    Seam(VLLM, f"{LOADER}.mtp_validation", "disable_mtp_completeness_check", ()),
)  # fmt: skip

TRAINER_SEAMS = (
    Seam(VLLM, BASE, "TrainerWeightTransferEngine.__init__",
         (("self", "client", "source", "is_sender", "rank"),
          ("self", "client", "source", "is_sender"))),  # signature before 0.33
    Seam(VLLM, BASE, "TrainerWeightTransferEngine.trainer_init",
         ("cls", "init_info", "client", "source")),
    Seam(VLLM, BASE, "TrainerWeightTransferEngine.send_weights", ("self",)),
    Seam(VLLM, BASE, "TrainerWeightTransferEngine.shutdown", ("self",)),
    Seam(VLLM, CLIENTS, "HTTPVLLMWeightSyncClient.__init__", ("self", "base_url", "timeout")),
    Seam(VLLM, BASE, "VLLMWeightSyncClient.init_weight_transfer_engine", ("self", "init_info")),
    Seam(VLLM, BASE, "VLLMWeightSyncClient.start_weight_update", ("self",)),
    Seam(VLLM, BASE, "VLLMWeightSyncClient.update_weights", ("self", "update_info")),
    Seam(VLLM, BASE, "VLLMWeightSyncClient.finish_weight_update", ("self", "weight_version")),
)  # fmt: skip

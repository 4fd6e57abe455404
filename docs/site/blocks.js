// made by scripts/make_docs.py
var hybridcompBlocks = {
 "engines": {
  "DeepSpeed": {
   "page": "engines/deepspeed.html",
   "stages": [
    "ZeRO 0",
    "ZeRO 1",
    "ZeRO 2",
    "ZeRO 3"
   ],
   "command": "deepspeed --module hybridcomp.run train.py --deepspeed_config ds_config.json"
  },
  "FSDP2": {
   "page": "engines/fsdp2_ddp.html",
   "stages": [
    "FSDP2",
    "HSDP"
   ],
   "command": "HYBRIDCOMP_CONFIG=block.json torchrun --nproc-per-node 8 -m hybridcomp.run train.py"
  },
  "DDP": {
   "page": "engines/fsdp2_ddp.html",
   "stages": [
    "DDP"
   ],
   "command": "HYBRIDCOMP_CONFIG=block.json torchrun --nproc-per-node 8 -m hybridcomp.run train.py"
  },
  "Megatron": {
   "page": "engines/megatron.html",
   "stages": [
    "distributed optimizer",
    "replicated optimizer"
   ],
   "command": "HYBRIDCOMP_CONFIG=block.json torchrun --nproc-per-node 8 -m hybridcomp.run pretrain_gpt.py"
  },
  "GPT-NeoX": {
   "page": "engines/neox.html",
   "stages": [
    "ZeRO 0",
    "ZeRO 1"
   ],
   "command": "GPT_NEOX_HOME=gpt-neox python -m hybridcomp.patches.neox config.yml"
  },
  "Hugging Face": {
   "page": "engines/huggingface.html",
   "stages": [
    "ZeRO 1",
    "ZeRO 2",
    "ZeRO 3"
   ],
   "command": "deepspeed --module hybridcomp.run train.py --deepspeed ds_config.json"
  }
 },
 "links": [
  "up to 1 Gb/s",
  "1 to 25 Gb/s",
  "faster, between nodes",
  "one machine"
 ],
 "blocks": {
  "DeepSpeed|up to 1 Gb/s|ZeRO 0": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 0
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "DeepSpeed|up to 1 Gb/s|ZeRO 1": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 1
    },
    "compression": {
     "preset": "recommended",
     "zero": "stepcode"
    }
   }
  ],
  "DeepSpeed|up to 1 Gb/s|ZeRO 2": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 2
    },
    "compression": {
     "preset": "recommended",
     "zero": "stepcode"
    }
   }
  ],
  "DeepSpeed|up to 1 Gb/s|ZeRO 3": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 3
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "DeepSpeed|1 to 25 Gb/s|ZeRO 0": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 0
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "DeepSpeed|1 to 25 Gb/s|ZeRO 1": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 1
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "DeepSpeed|1 to 25 Gb/s|ZeRO 2": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 2
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "DeepSpeed|1 to 25 Gb/s|ZeRO 3": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 3
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "DeepSpeed|faster, between nodes|ZeRO 0": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 0
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "DeepSpeed|faster, between nodes|ZeRO 1": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 1
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "DeepSpeed|faster, between nodes|ZeRO 2": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 2
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "DeepSpeed|faster, between nodes|ZeRO 3": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 3
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "FSDP2|up to 1 Gb/s|FSDP2": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "FSDP2|up to 1 Gb/s|HSDP": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "FSDP2|1 to 25 Gb/s|FSDP2": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "FSDP2|1 to 25 Gb/s|HSDP": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "FSDP2|faster, between nodes|FSDP2": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "FSDP2|faster, between nodes|HSDP": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "DDP|up to 1 Gb/s|DDP": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "DDP|1 to 25 Gb/s|DDP": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "DDP|faster, between nodes|DDP": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "Megatron|up to 1 Gb/s|distributed optimizer": [
   "block.json",
   {
    "preset": "recommended",
    "zero": "stepcode"
   }
  ],
  "Megatron|up to 1 Gb/s|replicated optimizer": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "Megatron|1 to 25 Gb/s|distributed optimizer": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "Megatron|1 to 25 Gb/s|replicated optimizer": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "Megatron|faster, between nodes|distributed optimizer": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "Megatron|faster, between nodes|replicated optimizer": [
   "block.json",
   {
    "preset": "recommended"
   }
  ],
  "GPT-NeoX|up to 1 Gb/s|ZeRO 0": [
   "config.yml",
   {
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 0
    },
    "deepspeed_extra_args": {
     "compression": {
      "preset": "recommended"
     }
    }
   }
  ],
  "GPT-NeoX|up to 1 Gb/s|ZeRO 1": [
   "config.yml",
   {
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 1
    },
    "deepspeed_extra_args": {
     "compression": {
      "preset": "recommended",
      "zero": "stepcode"
     }
    }
   }
  ],
  "GPT-NeoX|1 to 25 Gb/s|ZeRO 0": [
   "config.yml",
   {
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 0
    },
    "deepspeed_extra_args": {
     "compression": {
      "preset": "recommended"
     }
    }
   }
  ],
  "GPT-NeoX|1 to 25 Gb/s|ZeRO 1": [
   "config.yml",
   {
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 1
    },
    "deepspeed_extra_args": {
     "compression": {
      "preset": "recommended"
     }
    }
   }
  ],
  "GPT-NeoX|faster, between nodes|ZeRO 0": [
   "config.yml",
   {
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 0
    },
    "deepspeed_extra_args": {
     "compression": {
      "preset": "recommended"
     }
    }
   }
  ],
  "GPT-NeoX|faster, between nodes|ZeRO 1": [
   "config.yml",
   {
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 1
    },
    "deepspeed_extra_args": {
     "compression": {
      "preset": "recommended"
     }
    }
   }
  ],
  "Hugging Face|up to 1 Gb/s|ZeRO 1": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 1
    },
    "compression": {
     "preset": "recommended",
     "zero": "stepcode"
    }
   }
  ],
  "Hugging Face|up to 1 Gb/s|ZeRO 2": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 2
    },
    "compression": {
     "preset": "recommended",
     "zero": "stepcode"
    }
   }
  ],
  "Hugging Face|up to 1 Gb/s|ZeRO 3": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 3
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "Hugging Face|1 to 25 Gb/s|ZeRO 1": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 1
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "Hugging Face|1 to 25 Gb/s|ZeRO 2": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 2
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "Hugging Face|1 to 25 Gb/s|ZeRO 3": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 3
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "Hugging Face|faster, between nodes|ZeRO 1": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 1
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "Hugging Face|faster, between nodes|ZeRO 2": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 2
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ],
  "Hugging Face|faster, between nodes|ZeRO 3": [
   "ds_config.json",
   {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {
     "enabled": true
    },
    "zero_optimization": {
     "stage": 3
    },
    "compression": {
     "preset": "recommended"
    }
   }
  ]
 }
};

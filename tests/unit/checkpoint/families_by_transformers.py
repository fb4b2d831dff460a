"""Computes the logits of tests/unit/checkpoint/families.py with transformers, as a .npz file.

Run by an interpreter that has transformers and torch: python families_by_transformers.py OUT.npz
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main(out: str) -> None:
    import families
    import numpy as np
    import torch
    import transformers

    logits = {}
    for case, fields in families.CONFIGS.items():
        config = transformers.AutoConfig.for_model(**fields)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).eval().to(torch.float32)
        state = model.state_dict()
        drawn = {
            name: torch.from_numpy(families.numbers(name, tuple(tensor.shape)))
            for name, tensor in state.items()
        }
        if config.tie_word_embeddings:
            drawn["lm_head.weight"] = next(iter(drawn.values()))
        model.load_state_dict(drawn)
        with torch.no_grad():
            found = model(torch.tensor(families.TOKENS)).logits.numpy()
            logits[case] = found[:, -families.COMPARED :]
    np.savez_compressed(out, **logits)


if __name__ == "__main__":
    main(*sys.argv[1:])

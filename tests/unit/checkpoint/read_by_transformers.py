"""Reads an export with transformers; run by an interpreter that has transformers and torch."""

import sys

TEXT = "def é(x):\n\treturn 'ß'  # \x00 <|end of"


def main(folder: str, tokens: str, logits: str, back: str) -> None:
    import numpy as np
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert type(model).__name__ == "LlamaForCausalLM", type(model)
    assert not any(loading_info.values()), loading_info
    with torch.no_grad():
        np.save(logits, model.eval()(torch.tensor(np.load(tokens))).logits.numpy())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    assert tokenizer.eos_token_id == model.config.eos_token_id == 256
    model.save_pretrained(back)


if __name__ == "__main__":
    main(*sys.argv[1:])

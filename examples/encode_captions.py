"""Records what a text encoder of Hugging Face makes of captions, for dataset.context:

    pip install transformers
    python examples/encode_captions.py captions.txt words.npz openai/clip-vit-large-patch14

captions.txt has a line for each image, in the order of the set; words.npz gets tokens [M, L, D] in
float16 and lengths [M]. A line without words has length 0 and is as no caption. The encoder is
CLIP's (D = 768 and L = 77 for this one) or T5's.
"""

import sys
from pathlib import Path

import numpy as np
import torch

BATCH = 64
ENCODERS = {"clip": "CLIPTextModel", "t5": "T5EncoderModel"}  # by the model_type of config.json


@torch.no_grad()
def encode(captions: list[str], name: str) -> dict[str, np.ndarray]:
    """Tokens float16 [M, L, D] and lengths int64 [M]."""
    import transformers

    kind = transformers.AutoConfig.from_pretrained(name).model_type
    if kind not in ENCODERS:
        raise SystemExit(f"{name} is of type {kind}; choose one of {', '.join(ENCODERS)}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    encoder = getattr(transformers, ENCODERS[kind]).from_pretrained(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = encoder.to(device).eval()
    tokens, lengths = [], []
    for start in range(0, len(captions), BATCH):
        part = captions[start : start + BATCH]
        words = tokenizer(
            part, padding="max_length", truncation=True, max_length=77, return_tensors="pt"
        ).to(device)
        mask = words["attention_mask"]
        found = encoder(input_ids=words["input_ids"], attention_mask=mask).last_hidden_state
        tokens.append(found.half().cpu().numpy())  # [B, L, D]
        said = torch.tensor([bool(caption) for caption in part])
        lengths.append((mask.sum(1).cpu() * said).numpy())
    return {"tokens": np.concatenate(tokens), "lengths": np.concatenate(lengths)}


if __name__ == "__main__":
    source, out, name = sys.argv[1:]
    captions = [line.strip() for line in Path(source).read_text().splitlines()]
    arrays = encode(captions, name)
    np.savez(out, **arrays)
    print(f"{out}: {len(captions)} captions, tokens {list(arrays['tokens'].shape)}")

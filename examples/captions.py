"""Pictures with captions, to train a network on that is told what to draw:

    python examples/captions.py
    python train.py dataset=array dataset.path=pictures.npy dataset.context=words.npz \
        model=unet_tiny model.condition_dropout=0.1
    python sample.py ckpt=RUN context=told.npz n=4 guidance=3

pictures.npy has uint8 [M, 32, 32, 3] and words.npz tokens [M, L, D] with their lengths; told.npz
has those of the four captions below. The vectors of words are drawn at random: they stand for a
text encoder's output, which encode_captions.py records.
"""

import sys

import numpy as np

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 80, 220)}
SHAPES = ("square", "disc")
PLACES = {"left": 8, "right": 24}  # columns of the centre
TOLD = ("red disc left", "blue square right", "green disc right blue square left", "")
DIM = 16  # numbers of a word


def picture(things: list[tuple[str, str, str]]) -> np.ndarray:
    """uint8 [32, 32, 3] of some things on gray, each a colour, a shape and a place."""
    image = np.full((32, 32, 3), 128, np.uint8)
    y, x = np.mgrid[:32, :32]
    for colour, shape, place in things:
        across, down = np.abs(x + 0.5 - PLACES[place]), np.abs(y - 15.5)
        inside = across**2 + down**2 < 36 if shape == "disc" else np.maximum(across, down) < 5
        image[inside] = COLOURS[colour]
    return image


def encoded(captions: list[str]) -> dict[str, np.ndarray]:
    """Tokens [M, L, D] and lengths [M] of captions, a vector for each word."""
    known = dict.fromkeys([*COLOURS, *SHAPES, *PLACES])
    vectors = np.random.default_rng(0).normal(size=(len(known), DIM)).astype(np.float16)
    of_word = dict(zip(known, vectors, strict=True))
    words = [caption.split() for caption in captions]
    tokens = np.zeros((len(words), max(map(len, words)), DIM), np.float16)
    for row, caption in zip(tokens, words, strict=True):
        for i, word in enumerate(caption):
            # which place in the sentence it has, as a text encoder says it
            row[i] = of_word[word] + 0.5 * np.sin(np.arange(DIM) + i)
    return {"tokens": tokens, "lengths": np.array([len(caption) for caption in words])}


def main(count: int) -> None:
    """Write the files."""
    random = np.random.default_rng(1)
    pictures, captions = [], []
    for _ in range(count):
        places = random.permutation(list(PLACES))[: random.integers(1, 3)]
        things = [(random.choice(list(COLOURS)), random.choice(SHAPES), p) for p in places]
        pictures.append(picture(things))
        captions.append(" ".join(" ".join(thing) for thing in things))
    np.save("pictures.npy", np.stack(pictures))
    np.savez("words.npz", **encoded(captions))
    np.savez("told.npz", **encoded(list(TOLD)))
    print(f"pictures.npy, words.npz: {count} of them, the first {captions[0]!r}; told.npz: {TOLD}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)

"""Make trajectories.jsonl: conversations whose assistant turns the target itself sampled.

Reads: models/target. Writes: data/sources/trajectories.jsonl.
Run: python data/sources/make_trajectories.py (four CPU-minutes; same seed, same file).
The user turns are written here, before anything was sampled. A conversation is kept only if each of
its replies ended by itself, so every reply is whole; of several tries the first that ends is taken.
"""

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.files import read_json, write_jsonl
from eyas.states.sampler import BatchedSampler
from eyas.states.target import load_model
from eyas.tokens.codecs import Codec, load_codec

TARGET = Path("models/target")
OUT = Path("data/sources/trajectories.jsonl")
SEED = 20
MAX_CONVERSATIONS = 24
TRIES = 4
SAMPLING = {"temperature": 0.7, "top_p": 0.95}
MAX_NEW_TOKENS = 120
log = logging.getLogger("make_trajectories")

USER_TURNS = (
    ("What is a lighthouse for?", "Say that again in at most ten words."),
    ("Name one animal that sleeps through the winter.", "Where does it sleep?"),
    ("What do bees make?", "How do they make it?", "Why do they make it?"),
    ("Give me one tip for sleeping better.", "Why does that help?"),
    ("What is the opposite of 'ancient'?", "Use that word in a short sentence."),
    ("Which season comes after spring?", "What weather is usual then?"),
    ("What does a thermometer measure?", "Name one place where people use one."),
    ("Write one sentence about a quiet harbour.", "Now make it about a busy harbour."),
    ("What is a variable in programming?", "Show one line of Python that sets a variable."),
    ("Is the Moon a planet?", "What does it move around?"),
    ("Suggest a name for a small bakery.", "Suggest a slogan for it.", "Make the slogan shorter."),
    ("Why do we wash our hands?", "When should we do it?"),
    ("What colour do you get from mixing blue and yellow?", "And from red and yellow?"),
    ("Tell me one use of a magnet.", "What material does a magnet attract?"),
    ("What is the capital of Italy?", "What is one dish from that country?"),
    ("Explain the word 'harvest' to a child.", "Use it in a sentence."),
    ("What do you need to make a cup of tea?", "What comes first?", "How long should it steep?"),
    ("Give me a synonym for 'happy'.", "Give me one for 'tired'."),
    ("What is a compass?", "Which way does its needle point?"),
    ("Write a polite way to say no to an invitation.", "Make it one sentence."),
    ("What does the heart do?", "Name one way to keep it healthy."),
    ("How many days are in a week?", "Which of them are the weekend?"),
    ("What is a haiku?", "What could one be about?"),
    ("Why does ice float on water?", "Put that in simple words."),
    ("What is a library?", "What can people do there besides borrowing books?"),
    ("Name a musical instrument with strings.", "How is it played?"),
    ("What is recycling?", "Name one thing that can be recycled."),
    ("Write a title for a story about a lost kite.", "Write the first sentence of that story."),
    ("What does 'print' do in Python?", "Show me a small example."),
    ("What is the largest ocean?", "Name one animal that lives in it."),
    ("Why is it good to drink water?", "How can I remember to do it?"),
    ("What is a bridge?", "What are bridges made of?"),
    ("Give me one fact about penguins.", "Can they fly?"),
    ("Correct this: 'She go to school yesterday.'", "Which word was wrong?"),
    ("What is the past tense of 'write'?", "Use it in a question."),
    ("What is an umbrella used for?", "What is it usually made of?"),
)


def main() -> None:
    """Sample every conversation, keep the whole ones, write the first of them."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    about = read_json(TARGET / "eyas_target.json", hint="run `dvc repro target`")
    codec = load_codec(about["codec"], TARGET)
    with BatchedSampler(load_model(TARGET)) as sampler, ThreadPoolExecutor(len(USER_TURNS)) as pool:
        found = list(
            pool.map(lambda number: converse(sampler, codec, number), range(len(USER_TURNS)))
        )
    whole = [row for row in found if row is not None]
    log.info("%d of %d conversations are whole", len(whole), len(found))
    if len(whole) < MAX_CONVERSATIONS:
        raise EyasError(f"expected {MAX_CONVERSATIONS} whole conversations, got {len(whole)}")
    target = {"name": about["name"], "revision": about["revision"]}
    rows = (
        {"id": f"trajectory-{number:03d}", **row, "target": target}
        for number, row in enumerate(whole[:MAX_CONVERSATIONS], start=1)
    )
    write_jsonl(OUT, rows)


def converse(sampler: BatchedSampler, codec: Codec, number: int) -> dict[str, Any] | None:
    """Return messages and sampling of one conversation, or None if a reply would not end."""
    messages: list[dict[str, Any]] = []
    seeds: list[int] = []
    for turn, text in enumerate(USER_TURNS[number]):
        messages.append({"role": "user", "content": text})
        for attempt in range(TRIES):
            seed = seed_of(number, turn, attempt)
            reply = sampler.submit(
                codec.render_prompt(messages, ()),
                max_new_tokens=MAX_NEW_TOKENS,
                **SAMPLING,
                seed=seed,
                stop_ids=codec.stop_ids,
            ).result()
            content = codec.parse_reply(reply.ids).content
            if reply.finish_reason == "stop" and content:
                break
        else:
            return None
        messages.append({"role": "assistant", "content": content})
        seeds.append(seed)
    return {
        "messages": messages,
        "sampling": {**SAMPLING, "max_tokens": MAX_NEW_TOKENS, "seeds": seeds},
    }


def seed_of(number: int, turn: int, attempt: int) -> int:
    """Return the seed of one try, a hash of its place."""
    place = f"{SEED}/{number}/{turn}/{attempt}".encode()
    return int(hashlib.sha256(place).hexdigest()[:8], 16)


if __name__ == "__main__":
    main()

"""The demo checkpoint in fastllm (package ftllm, on the CPU): is the format the release's, not only ours?

    python tests/bench/demo_fastllm.py demo/checkpoint demo/questions.jsonl [COUNT]

Needs ftllm in the environment; imports nothing of evrun. fastllm's default device cannot take fp8 tiles of 32 rows: `cpu` can.
"""

import json
import os
import sys

from ftllm import llm
from tokenizers import Tokenizer

checkpoint, questions, count = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 20
llm.set_device_map("cpu")
llm.set_device_map("cpu", True)
model = llm.model(checkpoint, dtype="float32")
tokenizer = Tokenizer.from_file(os.path.join(checkpoint, "tokenizer.json"))
with open(questions, encoding="utf-8") as lines:
    asked = [q for q in map(json.loads, lines) if q["kind"] == "capital"][:count]
right = 0
for question in asked:
    ids = [0, *tokenizer.encode(question["prompt"], add_special_tokens=False).ids]
    pieces = model.stream_response_raw(ids, max_length=12, do_sample=False)
    answer = "".join(piece.decode() if isinstance(piece, bytes) else piece for piece in pieces)
    right += answer == question["answer"]
    print(f"{question['prompt']!r} -> {answer!r}{'' if answer == question['answer'] else ', expected ' + repr(question['answer'])}")  # noqa: T201
print(f"{right} of {len(asked)} right")  # noqa: T201
os._exit(0)  # its threads do not end

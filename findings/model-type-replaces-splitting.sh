#!/usr/bin/env bash
# `model_type: qwen2` in config.json replaces the splitting rule of tokenizer.json, whatever tokenizer_config.json says.
#
# Versions  transformers 5.19.0 with tokenizers 0.23.3.
# Guess     tokenizer.json is the whole definition of a fast tokenizer: the same ids as by the tokenizers library.
# Behaviour AutoTokenizer chooses its class by the model's type before `tokenizer_class`. Qwen2Tokenizer keeps the
#           vocabulary and merges of tokenizer.json, and builds normalizer and pre-tokenizer itself: digits one by one.
#           A model of that type with a vocabulary of another family (as distilled models have) gets other ids, with
#           no warning, even where the configuration names LlamaTokenizer; `qwen3` does not do that.
# Output    tokenizers library                       [257, 258]
#           PreTrainedTokenizerFast, no config.json  [257, 258]
#           PreTrainedTokenizerFast, qwen3           [257, 258]
#           PreTrainedTokenizerFast, qwen2           [16, 17, 18, 19, 20, 21]
#           LlamaTokenizer, qwen2                    [16, 17, 18, 19, 20, 21]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" --quiet --disable-pip-version-check install transformers==5.19.0 tokenizers==0.23.3
cd "$work"
HF_HUB_OFFLINE=1 HF_HOME="$work/hf" "$work/venv/bin/python" - <<'PYTHON'
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

alphabet = {character: at for at, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
vocabulary = {**alphabet, "12": 256, "123": 257, "456": 258, "45": 259}
merges = [("1", "2"), ("12", "3"), ("4", "5"), ("45", "6")]
plain = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
threes = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}]+"), "isolated")
plain.pre_tokenizer = pre_tokenizers.Sequence([threes, pre_tokenizers.ByteLevel(False, use_regex=False)])
plain.decoder = decoders.ByteLevel()


def ids(name, tokenizer_class, model_type):
    model = Path(name)
    model.mkdir()
    plain.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    if model_type:
        (model / "config.json").write_text(json.dumps({"model_type": model_type}))
    return AutoTokenizer.from_pretrained(f"./{name}").encode("123456", add_special_tokens=False)


whole, single = [257, 258], [16 + digit for digit in range(6)]
assert plain.encode("123456").ids == whole
print("tokenizers library", whole)
for number, (tokenizer_class, model_type, seen) in enumerate([
    ("PreTrainedTokenizerFast", None, whole),
    ("PreTrainedTokenizerFast", "qwen3", whole),
    ("PreTrainedTokenizerFast", "qwen2", single),
    ("LlamaTokenizer", "qwen2", single),
]):
    found = ids(f"model-{number}", tokenizer_class, model_type)
    print(f"{tokenizer_class}, {model_type or 'no config.json'}", found)
    assert found == seen, f"{found} instead of {seen}"
PYTHON

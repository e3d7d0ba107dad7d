#!/usr/bin/env python3
"""Writes small tokenizer files in the forms of SentencePiece, tiktoken and Mistral, and the token
ids that the libraries of vLLM make of them, into this directory.

    pip install 'transformers>=5.16.1,<5.21' sentencepiece tiktoken mistral_common protobuf
    python make.py

The versions of transformers are those that vLLM 0.33 takes.
"""

import base64
import contextlib
import io
import json
import random
import shutil
import tempfile
import unicodedata
from pathlib import Path

import sentencepiece
import tiktoken
import tiktoken.load
import tokenizers
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from sentencepiece import sentencepiece_model_pb2
from transformers import AutoTokenizer

HERE = Path(__file__).parent

WORDS = """the quick brown fox jumps over a lazy dog while model tokens route cache prefix engine
worker request answer number naïve café straße über señor Москва привет мир Ελλάδα 你好 世界 東京
日本語 안녕하세요 can't won't it's 2024 3.14 12345 function return None def class import print self
for in if not else elif lambda yield from with as try except raise finally assert""".split()

TEXTS = [
    "", " ", "  ", "   ", "\n", "\n\n", "\n\n\n", "\t", " \t \n ", "\r\n\r\n",
    "a", " a", "a ", "  a  ", "Hello world", "Hello  world", " Hello   world ", "▁", "▁▁a", "a▁b",
    " ▁ a", "the quick brown fox", "def f(x):\n    return x * 12345\n", "12345 3.14 0x1F 1,000",
    "naïve café", "nai\u0308ve cafe\u0301", "Straße ÜBER señor", "Москва привет мир", "Ελλάδα",
    "你好世界", "東京 日本語、テスト。", "안녕하세요 세계", "😀", "👩‍👩‍👧 family 🇩🇪", "a\u0000b",
    "\u00a0nbsp\u00a0", "ｆｕｌｌ ｗｉｄｔｈ", "ﬁne ligature ﬃ", "①②③ ½", "\u200bzero\u200bwidth\ufeff",
    "<s>", "<s> a</s>", "</s><s>b", "<unk> x <unk>", "a<tool>b <tool> c", "<ctl>x<sep>y", "<0x41><0x0A>",
    "<|begin|>hi<|end|>", "<|reserved_token_7|>", "[INST] hi [/INST]", "can't WON'T it's I'LL",
    "\U0010ffff\ue000", "e" * 40, " " * 40 + "x", "= == === ====", "İıſK", "a\u0301\u0327b 한글 ㄱㄴ",
    "https://example.org/a?b=c&d=%20e", "{\"key\": [1, 2, {\"x\": null}]}", "line one\nline two\n  three",
]

CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = "|".join([
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def corpus():
    rng = random.Random(7)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "st")]
    words = WORDS + ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(600)]
    ends = [".", "!", "?", ", and", "  two", " :)", "\t", " ...", "==", "()"]
    return [" ".join(rng.choices(words, k=rng.randint(3, 14))) + rng.choice(ends)
            for _ in range(3000)]


def train(name, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=model, num_threads=1,
        minloglevel=2, **options)
    (HERE / name).write_bytes(model.getvalue())


def sentencepiece_models():
    train("bpe.model", model_type="bpe", vocab_size=1000, byte_fallback=True, split_digits=True,
          normalization_rule_name="identity", remove_extra_whitespaces=False,
          allow_whitespace_only_pieces=True, user_defined_symbols=["<tool>", "\n\n"],
          control_symbols=["<ctl>", "<|begin|>"])
    # A small table of replacements, in the form that nmt_nfkc's has.
    rules = {"ﬁ": "fi", "ﬃ": "ffi", "\u00a0": " ", "①": "1", "②": "2", "½": "1⁄2", "\u200b": "",
             "\ufeff": "", "\t": " ", "\n": " ", "\r": " ", "e\u0301": "é", "i\u0308": "ï", "ſ": "s"}
    rules.update({chr(0xFF41 + i): chr(0x61 + i) for i in range(26)})
    code_points = [[" ".join(f"{ord(c):X}" for c in text) for text in rule] for rule in rules.items()]
    # The models contain the file's name.
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        Path("rules.tsv").write_text("".join("\t".join(rule) + "\n" for rule in code_points))
        table = {"normalization_rule_tsv": "rules.tsv"}
        train("unigram.model", model_type="unigram", vocab_size=600, byte_fallback=True,
              user_defined_symbols=["<sep>"], **table)
        train("unigram_unknown.model", model_type="unigram", vocab_size=400, **table)
    train("bpe_unknown.model", model_type="bpe", vocab_size=500, character_coverage=0.98,
          normalization_rule_name="identity")


def tiktoken_ranks():
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False)
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(CL100K), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    model.train_from_iterator(corpus(), trainer)
    letters = {}
    own = [b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or 0xAE <= b]
    others = [b for b in range(256) if b not in own]
    letters.update({chr(b): b for b in own})
    letters.update({chr(256 + i): b for i, b in enumerate(others)})
    vocab = sorted(model.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(letters[c] for c in token) for token, _ in vocab]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (HERE / "ranks.tiktoken").write_text("".join(lines))
    # Mistral's ranks begin with the bytes in their order.
    tokens = [bytes([byte]) for byte in range(256)] + [t for t in tokens if len(t) > 1]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tekken = {
        "config": {"pattern": TEKKEN, "num_vocab_tokens": len(tokens), "version": "v7",
                   "default_vocab_size": len(tokens) + 10 - 20, "default_num_special_tokens": 10},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
                  for rank, token in enumerate(tokens)],
        "special_tokens": [{"rank": rank, "token_str": token, "is_control": True}
                           for rank, token in enumerate(special)],
    }
    (HERE / "tekken.json").write_text(json.dumps(tekken, indent=0) + "\n")


def token(content, **flags):
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
             "special": True, **flags}
    return {"content": content, **flags}


LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False,
         "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LISTED = {"0": token("<unk>"), "1": token("<s>"), "2": token("</s>")}
BEGIN = {"900": token("<|begin|>"), "902": token("<|end|>", rstrip=True)}

# A name, the file's name in the model's directory and here, tokenizer_config.json, config.json.
OF_TRANSFORMERS = [
    ("llama", "tokenizer.model", "bpe.model", LLAMA, "llama"),
    ("llama_legacy", "tokenizer.model", "bpe.model",
     {**LLAMA, "legacy": True, "added_tokens_decoder": {**LISTED, "4": token("<|begin|>", rstrip=True)}},
     "llama"),
    ("llama_no_prefix", "tokenizer.model", "bpe.model",
     {**LLAMA, "add_prefix_space": False, "add_eos_token": True, "pad_token": "<pad>"}, "llama"),
    ("llama_extra", "tokenizer.model", "bpe.model",
     {**LLAMA, "additional_special_tokens": ["<|end|>"]}, "llama"),
    ("llama_extra_empty", "tokenizer.model", "bpe.model",
     {"tokenizer_class": "LlamaTokenizerFast", "additional_special_tokens": []}, "llama"),
    ("llama_unknown", "tokenizer.model", "bpe_unknown.model", LLAMA, "llama"),
    ("gemma", "tokenizer.model", "bpe.model",
     {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "bos_token": "<s>",
      "eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<ctl>"}, "gemma2"),
    ("generic", "tokenizer.model", "bpe.model", LLAMA, "mistral"),
    ("generic_listed", "tokenizer.model", "bpe.model",
     {**LLAMA, "added_tokens_decoder": {**LISTED, "3": token("<renamed>"), "5": token("<tool>", lstrip=True)}},
     "phi3"),
    ("generic_no_class", "tokenizer.model", "bpe_unknown.model", {}, "llama"),
    ("unigram", "tokenizer.model", "unigram.model",
     {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}, "internlm2"),
    ("unigram_unknown", "tokenizer.model", "unigram_unknown.model", {}, "olmo2"),
    ("tiktoken", "tiktoken.model", "ranks.tiktoken",
     {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": BEGIN,
      "bos_token": "<|begin|>"}, "llama"),
    ("llama3", "tokenizer.model", "ranks.tiktoken",
     {**LLAMA, "added_tokens_decoder": BEGIN, "bos_token": "<|begin|>", "eos_token": "<|end|>",
      "unk_token": None}, "llama"),
]


def plain(encode):
    """Ids of all texts, and those before and after when special tokens are added."""
    ids = [encode(text, False) for text in TEXTS]
    around = [encode(text, True) for text in TEXTS]
    before = around[0][:1] if around[0] and around[0][0] == around[14][0] else []
    after = around[0][len(before):]
    for inner, outer in zip(ids, around):
        assert outer == before + inner + after, (outer, inner)
    return {"before": before, "after": after, "ids": ids}


def of_transformers(file, source, config, model_type):
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        shutil.copy(HERE / source, scratch / file)
        (scratch / "tokenizer_config.json").write_text(json.dumps(config))
        (scratch / "config.json").write_text(json.dumps({"model_type": model_type}))
        tokenizer = AutoTokenizer.from_pretrained(scratch)
        return plain(lambda text, special: tokenizer.encode(text, add_special_tokens=special))


def of_tiktoken(pattern, special, prepare):
    ranks = tiktoken.load.load_tiktoken_bpe(str(HERE / "ranks.tiktoken"))
    special = special(len(ranks))
    encoding = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return plain(lambda text, _: encoding.encode(
        prepare(text), allowed_special="all", disallowed_special=()))


def of_mistral():
    tekken = Tekkenizer.from_file(HERE / "tekken.json")
    return plain(lambda text, special: tekken.encode(text, bos=special, eos=False))


def cases():
    for name, file, source, config, model_type in OF_TRANSFORMERS:
        expected = of_transformers(file, source, config, model_type)
        yield {"name": name, "file": file, "source": source, "tokenizer_config": config,
               "config": {"model_type": model_type}, **expected}
    kimi = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
            "tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": BEGIN}
    named = {int(number): entry["content"] for number, entry in BEGIN.items()}
    yield {"name": "kimi", "file": "tiktoken.model", "source": "ranks.tiktoken",
           "tokenizer_config": {**kimi, "added_tokens_decoder": {
               number: {**entry, "rstrip": False} for number, entry in BEGIN.items()}},
           "config": {"model_type": "kimi_k2"},
           **of_tiktoken(KIMI, lambda base: {named.get(i, f"<|reserved_token_{i}|>"): i
                                             for i in range(base, base + 256)}, str)}
    qwen = {"auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]},
            "tokenizer_class": "QWenTokenizer"}
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [f"<|extra_{i}|>" for i in range(205)]
    yield {"name": "qwen", "file": "qwen.tiktoken", "source": "ranks.tiktoken",
           "tokenizer_config": qwen, "config": {"model_type": "qwen"},
           **of_tiktoken(CL100K, lambda base: {t: base + i for i, t in enumerate(names)},
                         lambda text: unicodedata.normalize("NFC", text))}
    yield {"name": "tekken", "file": "tekken.json", "source": "tekken.json",
           "tokenizer_config": {"add_bos_token": False}, "config": {"model_type": "mistral"},
           **of_mistral()}


def fuzz_corpus():
    """Small files. The first byte chooses the file's name and the engine's class."""
    corpus = HERE.parent.parent / "fuzz/corpus/tokenizer_file"
    corpus.mkdir(exist_ok=True)
    tiny = sentencepiece_model_pb2.ModelProto()
    for number, piece in enumerate(["<unk>", "<s>", "</s>", "<t>", "▁", "a", "b", "▁a", "ab", "▁ab"]):
        tiny.pieces.add(piece=piece, score=-number, type=[2, 3, 3, 4, 1, 1, 1, 1, 1, 1][number])
    tiny.trainer_spec.model_type = 2
    bpe = tiny.SerializeToString()
    tiny.trainer_spec.model_type = 1
    unigram = tiny.SerializeToString()
    trained = sentencepiece_model_pb2.ModelProto.FromString((HERE / "unigram.model").read_bytes())
    tiny.normalizer_spec.precompiled_charsmap = trained.normalizer_spec.precompiled_charsmap
    lines = b"YQ== 0\nYg== 1\nIA== 2\nYWI= 3\nIGE= 4\nIGFi 5\n"
    tekken = {"config": {"pattern": "a+| b?", "default_vocab_size": 5, "default_num_special_tokens": 2},
              "vocab": [{"token_bytes": token} for token in ["YQ==", "Yg==", "YWI="]],
              "special_tokens": [{"rank": 1, "token_str": "<s>"}]}
    names = ["tekken.json", "tokenizer.model", "tiktoken.model", "qwen.tiktoken"]
    classes = ["llama", "gemma", "generic", "own"]
    for file, model, contents in [
        (0, 0, {"tekken": json.dumps(tekken).encode()}),
        (1, 0, {"bpe": bpe, "ranks": lines}), (1, 1, {"bpe": bpe}), (1, 2, {"bpe": bpe}),
        (1, 2, {"unigram": unigram, "replacements": tiny.SerializeToString()}),
        (2, 2, {"ranks": lines}), (3, 3, {"ranks": lines}),
    ]:
        for name, content in contents.items():
            target = corpus / f"{name}-{names[file].split('.')[0]}-{classes[model]}"
            target.write_bytes(bytes([file + 4 * model]) + content)


if __name__ == "__main__":
    sentencepiece_models()
    tiktoken_ranks()
    fuzz_corpus()
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases())
    texts = ",\n".join(json.dumps(text) for text in TEXTS)
    body = f'{{"texts":[\n{texts}],\n"cases":[\n{lines}]}}\n'
    (HERE / "expected.json").write_text(body, encoding="utf-8")

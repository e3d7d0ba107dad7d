"""Trains the two tiny tokenizers of the tests: `tests/fixtures/tiny` (byte-level BPE, ChatML with
tools; also the tokenizer of the quick start) and `tests/fixtures/tiny_sp` (the SentencePiece kind:
metaspace, byte fallback, a template that adds BOS).

Usage: python make_tokenizers.py REPO_ROOT [TEXT_FILE ...]
The training text is this project's own documentation plus the sentences below.
"""

import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = """
The quick brown fox jumps over the lazy dog. How many blocks does the worker hold now?
What is the weather in Berlin today? Please answer in one short sentence, with a number.
You are a helpful assistant. You are careful, brief and polite. Think step by step, then answer.
Write a function that returns the largest element of a list. def largest(items): return max(items)
{"name": "get_weather", "description": "Current weather of a city", "parameters": {"type": "object",
"properties": {"city": {"type": "string", "description": "Name of the city"}, "unit": {"type": "string",
"enum": ["celsius", "fahrenheit"]}}, "required": ["city"]}} {"type": "function", "function": {}}
Hello! Hi there, how are you? I am fine, thank you. I don't know, but we'll see; they've said it's ok.
Der Zug fährt über die Brücke nach Köln, wo die Straße endet. Größe, Übung, schön, Äpfel.
L'été dernier, où étiez-vous? Ça va très bien, merci beaucoup. Garçon, élève, naïve, cœur.
El niño come una manzana. ¿Dónde está la biblioteca? ¡Qué día tan bonito, señor!
Привет, как дела? Сегодня хорошая погода, и мы идём гулять в парк.
你好，世界。今天天气怎么样？我们一起去公园散步吧。请用中文回答这个问题。
こんにちは、元気ですか。今日はいい天気ですね。東京はどこですか。
안녕하세요, 오늘 날씨가 어때요? 감사합니다.
Numbers: 0 1 2 3 10 42 100 256 1024 2048 3.14159 1e-5 2026 1999 12:30 $5.99 50% #1 a+b=c x*y
    indented code:\n\tfor i in range(10):\n\t\tprint(i)\n    return None\n
"""

CONTROL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>",
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>",
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜sep｜>",
    "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>",
    "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
]
# Added, but not special: the form that tool and reasoning marks have in current models.
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(text):
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
    ])
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    size = 2048 - len(CONTROL) - len(MARKS)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tok.train_from_iterator([text], trainer)
    from tokenizers import AddedToken
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKS])
    return tok


def sentencepiece_like(text):
    """The normaliser and template that Llama 2 and the first Mistral checkpoints have."""
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*|[^▁]+"), behavior="isolated")
    trainer = trainers.BpeTrainer(vocab_size=1100, special_tokens=["<unk>", "<s>", "</s>"],
                                  limit_alphabet=120, show_progress=False)
    tok.train_from_iterator([text], trainer)
    state = json.loads(tok.to_str())
    learned = sorted(state["model"]["vocab"].items(), key=lambda kv: kv[1])
    order = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    order += [t for t, _ in learned if t not in ("<unk>", "<s>", "</s>")]
    state["model"]["vocab"] = {t: i for i, t in enumerate(order)}
    state["model"].update(byte_fallback=True, fuse_unk=True)
    state["pre_tokenizer"] = None  # the original kind merges over the whole text
    control = ["<start_of_turn>", "<end_of_turn>", "<start_of_image>", "[INST]", "[/INST]",
               "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    state["added_tokens"] = [dict(id=i, content=t, **flags) for i, t in enumerate(["<unk>", "<s>", "</s>"])]
    state["added_tokens"] += [dict(id=len(order) + i, content=t, **flags) for i, t in enumerate(control)]
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                 {"SpecialToken": {"id": "<s>", "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    tok = Tokenizer.from_str(json.dumps(state))
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                     decoders.Strip(" ", 1, 0)])
    return tok


def write(directory, tok, config, template):
    directory.mkdir(parents=True, exist_ok=True)
    body = json.dumps(json.loads(tok.to_str()), ensure_ascii=False, separators=(",", ":"))
    (directory / "tokenizer.json").write_text(body + "\n", encoding="utf-8")
    config = dict(config, chat_template=template)
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    print(directory, len(body), "bytes,", tok.get_vocab_size(), "tokens")


def main():
    root = Path(sys.argv[1])
    here = Path(__file__).parent
    text = SENTENCES * 3 + "\n".join(Path(p).read_text(encoding="utf-8") for p in sys.argv[2:])
    fixtures = root / "tests" / "fixtures"
    common = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32768}
    write(fixtures / "tiny", byte_level(text),
          dict(common, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>"),
          (here / "chatml_tools.jinja").read_text(encoding="utf-8"))
    write(fixtures / "tiny_sp", sentencepiece_like(text),
          dict(common, bos_token="<s>", eos_token="</s>", unk_token="<unk>"),
          (here / "llama2.jinja").read_text(encoding="utf-8"))


main()

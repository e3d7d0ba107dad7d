"""Makes a small model for vLLM's dummy weights, and a byte-level BPE tokenizer with a chat template, trained on
this repository's documents. FORM: a two-layer Llama (`full`), or six layers of Gemma 3, whose layers all slide
(`all-sliding`) or all but two (`sliding`).

usage: make_model.py DIR FORM VOCABULARY_SIZE
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CONTEXT_TOKENS = 4096
WINDOW_TOKENS = 64
SLIDING, FULL = "sliding_attention", "full_attention"
LAYERS = {"sliding": [SLIDING, SLIDING, FULL] * 2, "all-sliding": [SLIDING] * 6}
END, TURN_START, TURN_END = "<|endoftext|>", "<|turn|>", "<|end_turn|>"

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|turn|>tools\\n' + (tools | tojson) + '<|end_turn|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|turn|>' + message['role'] + '\\n' + (message['content'] or '') + '<|end_turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|turn|>assistant\\n' }}
{%- endif %}"""


def train_tokenizer(vocabulary_size: int) -> Tokenizer:
    root = Path(__file__).resolve().parent.parent.parent
    texts = sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in texts], trainer)
    return tokenizer


def main() -> None:
    out, form = Path(sys.argv[1]), sys.argv[2]
    out.mkdir(parents=True)
    tokenizer = train_tokenizer(int(sys.argv[3]))
    tokenizer.save(str(out / "tokenizer.json"))
    end = tokenizer.token_to_id(TURN_END)

    def write(name: str, value: dict) -> None:
        (out / name).write_text(json.dumps(value, indent=1) + "\n")

    write(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT_TOKENS,
            "bos_token": None,
            "eos_token": TURN_END,
            "pad_token": END,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write("generation_config.json", {"eos_token_id": end})
    layers = LAYERS.get(form)
    gemma = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": layers,
        "sliding_window": WINDOW_TOKENS,
        "query_pre_attn_scalar": 32,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
    }
    write(
        "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT_TOKENS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": tokenizer.get_vocab_size(),
            "bos_token_id": tokenizer.token_to_id(TURN_START),
            "eos_token_id": end,
            "pad_token_id": tokenizer.token_to_id(END),
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "attention_bias": False,
            "mlp_bias": False,
            **({} if layers is None else gemma),
        },
    )
    print(f"{tokenizer.get_vocab_size()} tokens in {out}")


main()

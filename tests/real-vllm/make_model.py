"""Makes a small model for vLLM's dummy weights, and a byte-level BPE tokenizer with a chat template, trained on
this repository's documents. FORM: a two-layer Llama (`full`), the same one behind a CLIP that makes 25 tokens of an
image (`images`), its first layer alone, which drafts for it (`draft`), or six layers of Gemma 3, whose layers all slide (`all-sliding`) or all but two (`sliding`).

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
{%- if message['tool_calls'] %}
{{- '<|turn|>calls\\n' + (message['tool_calls'] | tojson) + '<|end_turn|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|turn|>assistant\\n' }}
{%- endif %}"""

IMAGE, IMAGE_SIDE, PATCH_SIDE = "<image>", 70, 14
CONTENT = "(message['content'] or '')"
PARTS = """{%- if message['content'] is string %}{{- message['content'] }}{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}{{- '<image>' }}{%- else %}{{- part['text'] }}{%- endif %}
{%- endfor %}
{%- endif %}"""


def image_template() -> str:
    before, after = f" + {CONTENT} + '<|end_turn|>\\n' }}}}", "{{- '<|end_turn|>\\n' }}"
    return CHAT_TEMPLATE.replace(before, f" }}}}\n{PARTS}\n{after}")


def with_images(llama: dict, image: int) -> dict[str, dict]:
    """The files of a LLaVA with this language model."""
    side = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIDE,
        "patch_size": PATCH_SIDE,
        "projection_dim": 64,
    }
    selection = {"vision_feature_select_strategy": "default"}
    return {
        "config.json": {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "text_config": llama,
            "vision_config": vision,
            "image_token_index": image,
            "image_seq_length": (IMAGE_SIDE // PATCH_SIDE) ** 2,
            "vision_feature_layer": -2,
            "projector_hidden_act": "gelu",
            "torch_dtype": "bfloat16",
            **selection,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": IMAGE,
            "patch_size": PATCH_SIDE,
            "num_additional_image_tokens": 1,
            **selection,
        },
        "preprocessor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": IMAGE_SIDE},
            "crop_size": side,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
    }


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
    has_images = form == "images"
    if has_images:
        tokenizer.add_special_tokens([IMAGE])
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
            "chat_template": image_template() if has_images else CHAT_TEMPLATE,
            **({"image_token": IMAGE, "extra_special_tokens": {"image_token": IMAGE}} if has_images else {}),
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
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1 if form == "draft" else 2,
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
    }
    files = {"config.json": config}
    if has_images:
        files = with_images(config, tokenizer.token_to_id(IMAGE))
    for name, value in files.items():
        write(name, value)
    print(f"{tokenizer.get_vocab_size()} tokens in {out}")


main()

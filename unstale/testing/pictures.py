"""Small random vision-language models, and a task of reading digits from pictures."""

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from unstale.envs import Image, Message, NumberedTasks, Turn
from unstale.model.loading import no_progress_bars
from unstale.pictures import FIRST, PictureStore, numbers_in
from unstale.records import Task

_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IDEFICS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
_SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_TOWER: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "patch_size": 4,
    "initializer_range": 0.2,
}
_QWEN_TOWER = {**_TOWER, "num_heads": 2, "depth": 2, "out_hidden_size": 64}
_SIGLIP = {**_TOWER, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
_FIRST_QWEN = {**_TOWER, "num_heads": 2, "depth": 2, "embed_dim": 32, "mlp_ratio": 1}
TOWERS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {**_FIRST_QWEN, "hidden_size": 64},
    "qwen2_5_vl": {**_QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {**_QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    "smolvlm": _SIGLIP,
    "idefics3": _SIGLIP,
}
"""Type of a vision-language model -> sizes of its small vision encoder."""
NAMES: Mapping[str, str] = {
    "Qwen2-VL": "qwen2_vl",
    "Qwen2.5-VL": "qwen2_5_vl",
    "Qwen3-VL": "qwen3_vl",
    "SmolVLM": "smolvlm",
    "Idefics3": "idefics3",
}
"""Name in docs/models.md -> type of a vision-language model, a key of `TOWERS`."""
_TEMPLATE = """{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}PICTURE{%- else %}{{ part['text'] }}{%- endif %}{%- endfor %}
{%- endif %}{{ '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
WORDS = ("user", "assistant", "Which", "digit", *"0123456789")


def word_tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose tokens are `words` and the marks of a chat."""
    marks = ("<|pad|>", "<|im_start|>", "<|im_end|>")
    inner = Tokenizer(
        WordLevel({word: i for i, word in enumerate((*marks, *words))}, unk_token="<|pad|>")
    )
    inner.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": list(marks)})
    return made


def save_vision_model(
    kind: str, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None, **sizes: Any
) -> None:
    """Save a small random vision-language model with its processor to `folder`.

    `kind` is its type, a key of `TOWERS`. The tokenizer gets additional tokens for pictures.
    `sizes` replace sizes of the language model.
    """
    tokenizer = tokenizer or word_tokenizer()
    is_qwen = kind.startswith("qwen")
    added = _QWEN if is_qwen else _IDEFICS
    tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
    picture = "<|vision_start|><|image_pad|><|vision_end|>" if is_qwen else "<image>"
    tokenizer.chat_template = _TEMPLATE.replace("PICTURE", picture)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in added]
    language = {**_SIZES, "vocab_size": len(tokenizer), **sizes}
    if is_qwen:
        names = ("vision_start", "vision_end", "image", "video")
        about: dict[str, Any] = dict(zip((f"{name}_token_id" for name in names), ids, strict=True))
        sections = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        language["rope_parameters"] = sections
        about["vision_start_token_id"] = ids[0]
        options: dict[str, Any] = {"size": {"shortest_edge": 64, "longest_edge": 4096}}
        options["patch_size"] = 4
    else:
        about = {"image_token_id": ids[1], "scale_factor": 2}
        language["model_type"] = "llama"
        options = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 4}))
    config = AutoConfig.for_model(
        kind, text_config=language, vision_config=dict(TOWERS[kind]), **about
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    processor = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}.get(kind, "Qwen2VL")
    with no_progress_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        getattr(transformers, f"{processor}ImageProcessorPil")(**options).save_pretrained(folder)


def plain_inputs(model: Any, store: PictureStore, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the arguments with which plain transformers computes the sequence `tokens` with
    pictures.

    The pixels of the pictures are read from `store`. A picture must not be in the sequence twice.
    """
    row = torch.tensor([list(tokens)])
    is_picture = row >= FIRST
    inputs: dict[str, Any] = {"input_ids": row.masked_fill(is_picture, model.config.image_token_id)}
    arrays = [store.read(number) for number in numbers_in(tokens)]
    for name in ("pixel_values", "image_grid_thw", "pixel_attention_mask") if arrays else ():
        if name in arrays[0]:
            parts = [torch.from_numpy(each[name]) for each in arrays]
            inputs[name] = torch.cat(parts, int(parts[0].ndim > 3))
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = is_picture.int()
    return inputs


_FONT = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
"""For each digit 0 to 9: its seven rows of five points."""
SIDE = 16
"""Width and height of a picture, in pixels."""


def draw_digit(digit: int, random: Random) -> bytes:
    """Return a PNG picture of a digit, at a random place and in a random shade, with noise."""
    import PIL.Image

    ink, left, top = random.randint(160, 255), random.randint(2, 3), random.randint(0, 1)
    shades = [[random.randint(0, 20) for _ in range(SIDE)] for _ in range(SIDE)]
    for y, row in enumerate(_FONT[digit].split()):
        for x, point in enumerate(row):
            for place in range(4 * int(point)):
                shades[top + 2 * y + place // 2][left + 2 * x + place % 2] = ink
    data = BytesIO()
    PIL.Image.frombytes("L", (SIDE, SIDE), bytes(chain.from_iterable(shades))).save(data, "PNG")
    return data.getvalue()


class DigitEnv:
    """An environment that shows a picture of a digit.

    The reward is 1 if the reply begins with this digit, 0.1 for another digit, and 0 otherwise.
    """

    def __init__(self, digit: int, random: Random) -> None:
        self.digit = digit
        self._image = Image(draw_digit(digit, random), len("Which digit "))

    def begin(self) -> Turn:
        return Turn((Message("user", "Which digit ", images=(self._image,)),))

    def step(self, reply: Message) -> Turn:
        first, *_ = reply.content.split() or [""]
        right = first == str(self.digit)
        rewards = {"right": float(right), "form": 0.1 * (first.isdigit() and not right)}
        return Turn((), done=True, rewards=rewards, facts={"success": float(right)})


class DigitTasks(NumberedTasks):
    """Tasks to read a digit from a picture. All have the same text."""

    name = "digits"
    tools: tuple[Mapping[str, Any], ...] = ()

    def env(self, task: Task, seed: int) -> DigitEnv:
        random = Random(task.key)
        return DigitEnv(random.randrange(10), random)

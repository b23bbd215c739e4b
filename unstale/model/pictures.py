"""Pictures as input of vision-language models: from files to pixels, and from pixels to hidden
states.

The vision tower is frozen. So the features of a picture are the same in every version of the
weights, and are computed once for each picture.
"""

import copy
import hashlib
import random
import struct
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from unstale.config import ConfigError, install
from unstale.config.files import read_mapping
from unstale.config.hub import reading
from unstale.model.prefix_tree import Packed, PrefixTree, build_prefix_tree
from unstale.pictures import FIRST, PictureError, PictureStore, numbers_in

TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm")
"""Supported vision-language models, by `model_type` in `config.json`. Other models read only
text.
"""
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model folder that describe how a picture is converted to pixels."""
MAX_BYTES = 20 << 20
"""Largest size of a picture's file, in bytes."""
MAX_PIXELS = 1 << 25
_CACHE_BYTES = 256 << 20
"""Most bytes of memory for the features of recent pictures."""


def reads_pictures(folder: Path) -> bool:
    """Return True if the model in a folder is a supported vision-language model."""
    return read_mapping(folder / "config.json").get("model_type") in TYPES


def decoder_of(model: Any) -> Any:
    """Return the language model of a vision-language model, without its output head."""
    return model.base_model.get_decoder()


def tower_names(model: Any) -> frozenset[str]:
    """Return the names of all parameters outside the language model.

    Training never changes them.
    """
    trained = {id(each) for each in decoder_of(model).parameters()}
    trained |= {id(each) for each in model.get_output_embeddings().parameters()}
    return frozenset(name for name, each in model.named_parameters() if id(each) not in trained)


def freeze_tower(model: Any) -> frozenset[str]:
    """Exclude the parameters of `tower_names` from training, and return their names."""
    names = tower_names(model)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names


def processor_class(kind: str) -> type[Any]:
    """Return the processor class of transformers for a `model_type` in `TYPES`.

    A processor converts text and pictures to inputs of the model. This class does not need the
    packages for videos.
    """
    import transformers
    from transformers.models.auto import processing_auto

    # SmolVLM's differs from that of Idefics3 only for videos.
    names: Any = processing_auto
    name = names.PROCESSOR_MAPPING_NAMES["idefics3" if kind == "smolvlm" else kind]
    base = getattr(transformers, name)

    def check(self: Any, name: str, value: Any) -> Any:
        return value if value is None else base.check_argument_for_proper_class(self, name, value)

    return type(name, (base,), {"check_argument_for_proper_class": check})


_BROKEN = (OSError, ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, struct.error)
"""The errors that Pillow raises for damaged files, and for files that are not pictures."""


class PictureReader:
    """A converter of picture files to tokens. It also stores the pixels in a `PictureStore`."""

    def __init__(self, folder: Path, tokenizer: Any, store: PictureStore) -> None:
        """Load the processor of the model in a folder.

        Raises ConfigError if the folder has no processor, or if Pillow is not installed.
        """
        try:
            import PIL.Image
        except ModuleNotFoundError as error:
            raise ConfigError(f"pictures need {error.name}: {install('vision')}") from error
        from transformers import AutoImageProcessor

        self.store = store
        self._image = PIL.Image
        kind = read_mapping(folder / "config.json")["model_type"]
        about = folder / "processor_config.json"
        options = read_mapping(about) if about.is_file() else {}
        own = {"image_seq_len": options["image_seq_len"]} if "image_seq_len" in options else {}
        with reading(folder, "image processor"):
            image = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            self._processor = processor_class(kind)(image, tokenizer, **own)
        self.token = int(self._processor.image_token_id)
        """The id of the token that the chat template writes for a picture."""
        self._known: dict[str, tuple[int, ...]] = {}

    def tokens(self, data: bytes) -> tuple[int, ...]:
        """Return the tokens that stand for a picture, and store its pixels.

        `data` is the picture's file, such as a PNG. Raises `PictureError` if it is not a picture,
        or too large.
        """
        digest = hashlib.sha256(data).hexdigest()
        if self.store.find(digest) is None:
            self.store.add(digest, self._arrays(data))
        return self.known(digest)

    def known(self, digest: str) -> tuple[int, ...]:
        """Return the tokens of a stored picture. `digest` is the SHA-256 of its file.

        Raises KeyError if the store does not have the picture.
        """
        if digest not in self._known:
            number = self.store.find(digest)
            if number is None:
                raise KeyError(digest)
            found = self.store.read(number)["tokens"].tolist()
            self._known[digest] = tuple(number if each == _PIXELS else each for each in found)
        return self._known[digest]

    def _arrays(self, data: bytes) -> dict[str, Any]:
        inputs = self._processor(
            text=[self._processor.image_token],
            images=[[self._decoded(data)]],
            add_special_tokens=False,
            return_tensors="np",
        )
        arrays = {name: inputs[name] for name in _INPUTS if name in inputs}
        pixels = arrays["pixel_values"]
        if pixels.ndim == 5 and not pixels.any((-1, -2, -3)).all():  # it would be read as padding
            raise PictureError("a part of the picture is one even grey, which the model leaves out")
        tokens = inputs["input_ids"][0]
        return {"tokens": np.where(tokens == self.token, _PIXELS, tokens), **arrays}

    def _decoded(self, data: bytes) -> Any:
        if len(data) > MAX_BYTES:
            raise PictureError(f"a picture has {len(data):,} bytes, at most {MAX_BYTES:,}")
        try:
            image = self._image.open(BytesIO(data))
            if image.width * image.height > MAX_PIXELS:
                raise PictureError(
                    f"a picture has {image.width} x {image.height} pixels, at most {MAX_PIXELS:,}"
                )
            return image.convert("RGB")
        except PictureError:
            raise
        except (*_BROKEN, self._image.DecompressionBombError) as error:
            raise PictureError(
                f"{len(data):,} bytes are no picture that Pillow reads, such as PNG or JPEG: "
                f"{type(error).__name__}"
            ) from None


_PIXELS = -1
"""The number in the store that represents a token of a picture's pixels. Some processors write
other tokens between these.
"""
_INPUTS = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
"""The processor's outputs that a model's `get_image_features` reads."""
_Features = tuple[Tensor, ...]
"""The features `[n, H]` of a picture's n tokens: first their embeddings, then what some models add
to the hidden states of further layers.
"""


class PictureInputs:
    """The inputs of a language model, computed from tokens and from the pictures among them."""

    def __init__(self, reader: PictureReader) -> None:
        self.reader = reader
        self._features: OrderedDict[tuple[Any, ...], _Features] = OrderedDict()
        self._num_bytes = 0
        self._grids: dict[int, tuple[int, Tensor]] = {}
        """The number of tokens of each known picture, and its size in time, height and width."""

    @property
    def store(self) -> PictureStore:
        return self.reader.store

    def states(self, model: Any, tokens: Tensor, *, start: int = 0, cache: Any = None) -> Any:
        """Run the language model on `tokens[start:]`.

        Return transformers' output, which has no logits. `tokens` `[n]` are a whole sequence, or
        its beginning. `cache` has the keys and values of the first `start` tokens, and receives
        those of the others. If it is None, nothing is cached.
        """
        embedding = model.get_input_embeddings()
        device = embedding.weight.device
        own = tokens[start:]
        states = embedding(own.masked_fill(own >= FIRST, 0).to(device))
        options: dict[str, Any] = {"use_cache": cache is not None, "past_key_values": cache}
        if hasattr(model.base_model, "get_rope_index"):
            options["position_ids"] = self.positions(model, tokens)[:, None, start:].to(device)
        at, features = self._rows(model, tokens, start)
        if features:
            at = at.to(device)
            first, *deeper = features
            states = states.index_put((at,), first)
            if deeper:
                where = torch.zeros(1, len(own), dtype=torch.bool, device=device)
                where[0, at] = True
                options |= {"visual_pos_masks": where, "deepstack_visual_embeds": deeper}
        return decoder_of(model)(inputs_embeds=states[None], **options)

    def packed(self, model: Any, run: PrefixTree) -> dict[str, Any]:
        """Return the arguments with which transformers' language model runs on a prefix tree."""
        embedding = model.get_input_embeddings()
        device = embedding.weight.device
        tokens = run.tokens
        states = embedding(tokens.masked_fill(tokens >= FIRST, 0).to(device))
        positions = run.positions[None].repeat(3, 1)
        has_rope = hasattr(model.base_model, "get_rope_index")
        starts = [*(~run.follows).nonzero().squeeze(1).tolist(), len(run.place)]
        found = []
        for start, end in pairwise(starts):
            place = run.place[start:end]
            if has_rope:
                positions[:, place] = self.positions(model, tokens[place])
            at, features = self._rows(model, tokens[place], 0)
            found += [(place[at], features)] if features else []
        options: dict[str, Any] = {"use_cache": False}
        options["position_ids"] = (positions[:, None] if has_rope else positions[:1]).to(device)
        if found:
            at = torch.cat([place for place, _ in found]).to(device)
            parts = zip(*(features for _, features in found), strict=True)
            first, *deeper = (torch.cat(part) for part in parts)
            states = states.index_put((at,), first)
            if deeper:  # in the order of the tree, in which siblings share a picture
                where = torch.zeros(len(tokens), dtype=torch.bool, device=device)
                where[at] = True
                dense = [torch.zeros_like(states).index_put((at,), each)[where] for each in deeper]
                options |= {"visual_pos_masks": where[None], "deepstack_visual_embeds": dense}
        return {"inputs_embeds": states[None], **options}

    def positions(self, model: Any, tokens: Tensor) -> Tensor:
        """Return the positions `[3, n]` of tokens in time, height and width (M-RoPE)."""
        whole, last = tokens, int(tokens[-1])
        if last >= FIRST:  # a part of a prompt may end within a picture
            missing = -int((tokens == last).sum()) % self._grid(last)[0]
            whole = torch.cat([tokens, tokens.new_full((missing,), last)])
        grids = [self._grid(each)[1] for each, _ in groupby(whole.tolist()) if each >= FIRST]
        if not grids:
            return torch.arange(len(tokens)).expand(3, -1)
        found, _ = model.base_model.get_rope_index(
            whole[None],
            mm_token_type_ids=(whole >= FIRST).int()[None],
            image_grid_thw=torch.cat(grids),
        )
        positions: Tensor = found[:, 0, : len(tokens)]
        return positions

    def _grid(self, number: int) -> tuple[int, Tensor]:
        if number not in self._grids:
            read = self.store.read(number)
            count = int((read["tokens"] == _PIXELS).sum())
            self._grids[number] = count, torch.from_numpy(read["image_grid_thw"])
        return self._grids[number]

    def _rows(self, model: Any, tokens: Tensor, start: int) -> tuple[Tensor, _Features]:
        """Return the places of picture tokens in `tokens[start:]`, and their features.

        A sequence may have a picture several times. So the k-th token of this picture in the
        sequence has the feature row k modulo the number of tokens of one copy.
        """
        places, found = [torch.empty(0, dtype=torch.long)], []
        for number in numbers_in(tokens[start:].tolist()):
            at = (tokens == number).nonzero().squeeze(1)
            features = self.features(model, number)
            rows = (torch.arange(len(at)) % len(features[0]))[at >= start]
            places.append(at[at >= start] - start)
            found.append([each[rows.to(each.device)] for each in features])
        order = torch.cat(places).argsort()
        parts = zip(*found, strict=True)
        return torch.cat(places)[order], tuple(torch.cat(p)[order.to(p[0].device)] for p in parts)

    @torch.no_grad()
    def features(self, model: Any, number: int) -> _Features:
        """Return the features of a stored picture. `number` is the picture's number in the store.

        Raises `PictureError` if its pixels are lost.
        """
        weight = model.get_input_embeddings().weight
        key = number, weight.dtype, weight.device
        if key in self._features:
            self._features.move_to_end(key)
            return self._features[key]
        read = self.store.read(number)
        inputs = {
            name: torch.from_numpy(read[name]).to(weight.device) for name in _INPUTS if name in read
        }
        out = model.base_model.get_image_features(**inputs, return_dict=True)
        deeper = getattr(out, "deepstack_features", None) or ()
        found = (torch.cat(tuple(each)) for each in (out.pooler_output, *deeper))
        features = self._features[key] = tuple(each.to(weight.dtype) for each in found)
        self._num_bytes += sum(each.nbytes for each in features)
        while self._num_bytes > _CACHE_BYTES and len(self._features) > 1:
            _, dropped = self._features.popitem(last=False)
            self._num_bytes -= sum(each.nbytes for each in dropped)
        return features


def load_pictures(
    folder: Path, tokenizer: Any, store: PictureStore | None = None
) -> PictureInputs | None:
    """Return the `PictureInputs` of the model in a folder. None for a model of text only."""
    if not reads_pictures(folder):
        return None
    return PictureInputs(PictureReader(folder, tokenizer, store or PictureStore()))


class PictureProbe:
    """A test input: a text with three pictures, of which two are equal.

    The methods return the logits of its n tokens, computed in different ways.
    """

    def __init__(self, pictures: PictureInputs) -> None:
        reader = copy.copy(pictures.reader)
        reader.store, reader._known = PictureStore(), {}
        noise = random.Random(0)
        self._inputs = PictureInputs(reader)
        self._images = [
            reader._image.frombytes("RGB", size, noise.randbytes(3 * size[0] * size[1]))
            for size in ((64, 48), (48, 64))
        ]
        first, second = (reader.tokens(_png(image)) for image in self._images)
        self._tokens = torch.tensor([5, 6, *first, 7, 8, *second, 9, *first, 10, 11])

    def plain(self, model: Any) -> list[Tensor]:
        """Return the logits `[n, V]` that transformers computes, with its own processor."""
        processor = self._inputs.reader._processor
        one, other = self._images
        text = [processor.image_token * 3]
        inputs = processor(text=text, images=[[one, other, one]], return_tensors="pt")
        options = {name: inputs[name] for name in _INPUTS if name in inputs}
        is_picture = self._tokens >= FIRST
        if hasattr(model.base_model, "get_rope_index"):
            options["mm_token_type_ids"] = is_picture.int()[None]
        device = model.get_input_embeddings().weight.device
        tokens = self._tokens.masked_fill(is_picture, self._inputs.reader.token)[None].to(device)
        options = {name: each.to(device) for name, each in options.items()}
        return [model(input_ids=tokens, use_cache=False, **options).logits[0]]

    def packed(self, model: Any, run: Callable[..., Tensor]) -> list[Tensor]:
        """Return the logits `[n, V]` of a pass in which the text is packed with two other texts.

        `run` is `forward.run_model`.
        """
        sequences = [self._tokens[-2:], self._tokens, self._tokens[:-1]]
        ends = [0, *accumulate(map(len, sequences))]
        tree = build_prefix_tree(Packed(torch.cat(sequences), tuple(ends)), share=True)
        rows = tree.place[ends[1] : ends[2]].to(model.get_input_embeddings().weight.device)
        hidden = run(model.base_model, tree, rows, True, self._inputs)
        return [model.get_output_embeddings()(hidden)]

    def logits(self, model: Any, parts: int) -> list[Tensor]:
        """Return the logits `[n, V]` that `PictureInputs.states` gives, computed in `parts` calls.

        Each call continues the key-value cache of the call before.
        """
        cache = None if parts == 1 else DynamicCache(config=decoder_of(model).config)
        ends = [len(self._tokens) * (part + 1) // parts for part in range(parts)]
        found = []
        for start, end in zip([0, *ends], ends, strict=False):
            out = self._inputs.states(model, self._tokens[:end], start=start, cache=cache)
            found.append(model.get_output_embeddings()(out.last_hidden_state)[0])
        return [torch.cat(found)]


def _png(image: Any) -> bytes:
    data = BytesIO()
    image.save(data, "PNG")
    return data.getvalue()

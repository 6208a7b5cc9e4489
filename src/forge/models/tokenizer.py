"""Text and conversations to tokens and back, with the mask of what the assistant says.

The tokens of a conversation are always those of its whole text, tokenised once, exactly as `apply_chat_template` gives
them. The mask is laid over them by character positions (`forge.models.chat`), so asking for it never changes a token.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.errors import MISSING, DataError, ModelError
from forge.models.chat import ChatTemplate, Message, Span
from forge.models.hf_config import SpecialIds
from forge.models.long_text import LONG_TEXT, TextTooLong, characters_per_token, encode_long

_TAG = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
_CLASSES = {
    **{(family, name): "TokenizersBackend" for family in ("llama", "qwen3", "qwen3_moe") for name in _GENERIC},
    **{
        (family, name): "Qwen2Tokenizer"
        for family in ("qwen2", "qwen3", "qwen3_moe")
        for name in ("Qwen2Tokenizer", "Qwen2TokenizerFast")
    },
}
"""Maps `model_type` of config.json and `tokenizer_class` of tokenizer_config.json to the class that `AutoTokenizer`
chooses. Importing `AutoTokenizer` imports torch and takes seconds, and a controller needs nothing of it."""


class ChatTokenizer:
    """A tokenizer and its chat template. Make one with `load`.

    It can be pickled, and what arrives needs no file: the other process may be on another host.
    """

    def __init__(self, tokenizer: Any, *, name: str, stop_ids: Iterable[int] = ()) -> None:
        """`tokenizer` is a fast one of `transformers`, `name` says where it is from, `stop_ids` end generation too."""
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                "The tokenizer cannot map tokens to characters.",
                path=name,
                value=type(tokenizer).__name__,
                rule="a tokenizer of the library `tokenizers`, with a tokenizer.json",
                repair="save it in that form with `transformers`, or use another model",
            )
        self.name = name
        self._tokenizer = tokenizer
        self._stop_ids = tuple(stop_ids)
        self._templates: dict[str, ChatTemplate] = {}
        self._prepare()

    @classmethod
    def load(cls, folder: str | Path, *, chat_template: str | Path | None = None) -> ChatTokenizer:
        """Load the tokenizer of a model's folder. `chat_template` is a Jinja file to use instead of its own.

        A folder without a chat template loads; only conversations then raise.
        """
        folder = Path(folder)
        if not any((folder / name).is_file() for name in _FILES):
            raise ModelError(
                "There is no tokenizer in this folder.",
                path=str(folder),
                rule=f"a folder with at least one of {', '.join(_FILES)}",
                repair="check the path, or fetch the model with `forge download`",
            )
        try:
            tokenizer = _class_of(folder).from_pretrained(str(folder), local_files_only=True)
        except Exception as error:
            raise ModelError(
                "The tokenizer cannot be loaded.",
                path=str(folder),
                rule=f"files that `transformers` can load: {type(error).__name__}: {error}",
                repair="fetch the tokenizer's files again with `forge download`",
            ) from error
        if chat_template is not None:
            tokenizer.chat_template = _read_template(Path(chat_template))
        name = str(folder if chat_template is None else chat_template)
        return cls(tokenizer, name=name, stop_ids=_generation_stops(folder))

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and for each whether the assistant says it.

        The mask covers what the assistant generates, the end of its turn included, and not the header before it. A
        token counts only if all its characters do. `options` go to the template: tools=…, enable_thinking=….
        """
        text, spans = self._template(options).render_spans(messages, **options)
        _check_calls(messages, text)
        encoding = self._plain.encode(_checked(text), add_special_tokens=False)
        return encoding.ids, _mask(encoding.offsets, spans)

    def encode_prompt(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Return the tokens after which the assistant's answer is to be generated."""
        options = {"add_generation_prompt": add_generation_prompt, **options}
        return self.encode_rendered(self.render_prompt(messages, **options))

    def render_prompt(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **options: Any) -> str:
        """Return the text of which `encode_prompt` gives the tokens."""
        options = {"add_generation_prompt": add_generation_prompt, **options}
        return self._template(options).render(messages, **options)

    def encode_rendered(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the tokens of text that has its own special tokens, as a rendered conversation does: nothing is added.

        With `max_tokens`, a long text of more tokens raises `TextTooLong`: before it is tokenised where its length
        alone says so, and without a list of its tokens otherwise. Other threads run while a long text is tokenised.
        """
        return self._encode(self._plain, text, add_special_tokens=False, max_tokens=max_tokens)

    def encode_literal(self, text: str, *, tags: bool = True) -> list[int]:
        """Return the tokens of text in which special tokens are plain text: no control token is among them.

        With `tags` other tokens that look like tags (`tag_tokens`) are plain text, too.
        """
        tags = tags and bool(self._tag_tokens)
        if tags not in self._literal:
            from tokenizers import Tokenizer

            content = json.loads(self._plain.to_str())
            for token in content["added_tokens"]:
                token["special"] = token["special"] or (tags and token["content"] in self._tag_tokens)
            literal = Tokenizer.from_str(json.dumps(content, ensure_ascii=False))
            literal.encode_special_tokens = True
            self._literal[tags] = literal
        return self._encode(self._literal[tags], text, add_special_tokens=False, max_tokens=None)

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text, with what the tokenizer puts before it, such as BOS, and with EOS at its end."""
        ids = self.encode_whole(text)
        eos = self.eos_token_id
        return ids if ids and ids[-1] == eos else [*ids, eos]

    def encode_whole(self, text: str) -> list[int]:
        """Encode plain text as `transformers` does by default: with what the tokenizer itself puts around it."""
        ids: list[int] = self._whole.encode(_checked(text), add_special_tokens=True).ids
        return ids

    def encode_beginning(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the tokens of a text to be continued: with what the tokenizer puts before it, and no end.

        `max_tokens` is as in `encode_rendered`.
        """
        most = None if max_tokens is None else max_tokens + 1  # an end that is taken away again
        ids = self._encode(self._whole, text, add_special_tokens=True, max_tokens=most)
        if len(ids) > 1 and ids[-1] == self._tokenizer.eos_token_id and not text.endswith(self._tokenizer.eos_token):
            ids.pop()
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of tokens, unchanged: no spaces are tidied up."""
        text: str = self._whole.decode(list(ids), skip_special_tokens=skip_special)
        return text

    @property
    def eos_token_id(self) -> int:
        """The token that ends a text."""
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise ModelError(
                "The tokenizer has no token that ends a text.",
                path=self.name,
                value=None,
                rule="tokenizer_config.json must name an eos_token",
                repair="add eos_token to tokenizer_config.json",
            )
        return int(eos)

    @property
    def pad_token_id(self) -> int:
        """A token to fill up with: EOS where the tokenizer names none. No mask is ever made from it."""
        pad = self._tokenizer.pad_token_id
        return self.eos_token_id if pad is None else int(pad)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Where generation ends: EOS, what generation_config.json names, and the end of a turn."""
        return self._all_stops

    @property
    def end_of_turn(self) -> str:
        """The text of the token that ends an assistant's turn: EOS where the template shows none."""
        end = self._template({}).end_of_turn() if self.has_chat_template else None
        return end or self.decode([self.eos_token_id])

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts of the control tokens."""
        return self._special_tokens

    @property
    def tag_tokens(self) -> tuple[str, ...]:
        """The texts of other tokens that were added to the vocabulary and look like tags: `<think>`, `[INST]`."""
        return self._tag_tokens

    @property
    def special_ids(self) -> SpecialIds:
        """What `write_hf_config` writes into a config.json."""
        found = self._tokenizer
        return SpecialIds(bos=found.bos_token_id, eos=found.eos_token_id, pad=found.pad_token_id)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are. A model may have more rows than that."""
        return len(self._tokenizer)

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """All tokens, with their numbers; special and other added tokens included."""
        found: dict[str, int] = self._whole.get_vocab(with_added_tokens=True)
        return found

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return bool(self._tokenizer.chat_template)

    @property
    def chat_template(self) -> str:
        """The template of conversations with tools; empty where there is none."""
        return str(self._tokenizer.get_chat_template(tools=[{}])) if self.has_chat_template else ""

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files and the chat template in use into a folder."""
        self._tokenizer.save_pretrained(str(folder))

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_tokenizer": self._tokenizer, "_stop_ids": self._stop_ids}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._templates = {}
        self._prepare()

    def _prepare(self) -> None:
        """Keep two tokenizers without padding and truncation: as it came, and with untrimmed character positions.

        Post-processors trim positions and add tokens around a text; a rendered conversation has its own.
        """
        from tokenizers import Tokenizer

        self._characters_per_token: object = MISSING
        text = self._tokenizer.backend_tokenizer.to_str()
        self._whole, self._plain = Tokenizer.from_str(text), Tokenizer.from_str(text)
        for each in (self._whole, self._plain):
            each.no_padding()
            each.no_truncation()
        self._plain.post_processor = None
        self._literal: dict[bool, Any] = {}
        known = self._tokenizer.added_tokens_decoder.values()
        self._special_tokens = tuple(token.content for token in known if token.special)
        others = (token.content for token in known if not token.special)
        self._tag_tokens = tuple(text for text in others if _TAG.fullmatch(text))
        stops = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
        stops += self._stop_ids
        if self.has_chat_template:
            end = self._template({}).end_of_turn()
            stops += [] if end is None else [self._tokenizer.convert_tokens_to_ids(end)]
        self._all_stops = tuple(dict.fromkeys(int(stop) for stop in stops))

    def _encode(self, tokenizer: Any, text: str, *, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        if len(text) < LONG_TEXT:
            ids: list[int] = tokenizer.encode(_checked(text), add_special_tokens=add_special_tokens).ids
            return ids
        if max_tokens is not None:
            if self._characters_per_token is MISSING:
                self._characters_per_token = characters_per_token(self._plain)
            bound = self._characters_per_token
            if isinstance(bound, int) and len(text) > bound * max_tokens:
                raise TextTooLong(f"{len(text)} characters, at least {-(-len(text) // bound)} tokens")
        return encode_long(tokenizer, _checked(text), add_special_tokens=add_special_tokens, max_tokens=max_tokens)

    def _template(self, options: dict[str, Any]) -> ChatTemplate:
        if not self.has_chat_template:
            raise ModelError(
                "The tokenizer has no chat template.",
                path=self.name,
                rule="conversations need a template that turns them into text",
                repair="set data.chat_template to a file with a Jinja template, or use the chat version of the model",
            )
        text = self._tokenizer.get_chat_template(tools=options.get("tools"))
        if text not in self._templates:
            stops = [self._tokenizer.eos_token, *map(self._whole.id_to_token, self._stop_ids)]
            self._templates[text] = ChatTemplate(
                text,
                self.name,
                words=dict(self._tokenizer.special_tokens_map),
                special_tokens=self._special_tokens,
                stop_tokens=tuple(stop for stop in stops if stop is not None),
            )
        return self._templates[text]


def _checked(text: str) -> str:
    """Return the text, if it is one: JSON can name halves of characters, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            "A text holds half of a character.",
            path=f"text[{error.start}]",
            value=text[error.start : error.end],
            rule="text that can be written as UTF-8: no lone surrogates",
            repair="send whole characters, or replace it with U+FFFD",
        ) from None
    return text


def _check_calls(messages: Sequence[Message], text: str) -> None:
    """Check that the template keeps tool calls: one that drops them teaches to say nothing."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            name = (call.get("function") or call).get("name") if isinstance(call, Mapping) else None
            if isinstance(name, str) and name not in text:
                raise DataError(
                    "the chat template leaves the tool calls of a message out",
                    path="tool_calls",
                    value=name,
                    rule="what an assistant calls is in the text that the template makes",
                    repair="give a template that renders tool calls with data.chat_template",
                )


def _mask(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[bool]:
    mask = [False] * len(offsets)
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    for start, end in spans:
        first, last = bisect_left(starts, start), bisect_right(ends, end)
        mask[first:last] = [True] * max(0, last - first)
    return mask


def _generation_stops(folder: Path) -> tuple[int, ...]:
    """Return the ends of generation that a model's own settings name; Llama 3 has several."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            "The model's generation settings cannot be read.",
            path=str(path),
            rule=f"a JSON object: {error}",
            repair="fetch the file again with `forge download`, or remove it",
        ) from None
    listed = named if isinstance(named, list) else [named]
    return tuple(stop for stop in listed if isinstance(stop, int))


def _read_template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            "The chat template cannot be read.",
            path=str(path),
            rule=f"a text file in UTF-8: {error}",
            repair="correct data.chat_template or generator.chat_template, or remove it to use the tokenizer's own",
        ) from None
    ChatTemplate(text, str(path)).check()
    return text


def _class_of(folder: Path) -> Any:
    """Return the class of `transformers` that loads this folder's tokenizer, without torch where that is known."""
    import transformers

    settings, model = (_read_settings(folder / name) for name in ("tokenizer_config.json", "config.json"))
    name = _CLASSES.get((str(model.get("model_type")), str(settings.get("tokenizer_class"))))
    if name is None or "auto_map" in settings or not (folder / "tokenizer.json").is_file():
        return transformers.AutoTokenizer
    return getattr(transformers, name)


def _read_settings(path: Path) -> dict[str, Any]:
    """Return what a JSON file of a model holds; nothing where `transformers` is to say what is wrong with it."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

"""Tokenizer, special tokens, BOS and chat template of a Hugging Face directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shared.model.hf_files import MAX_CONFIG, JsonFile, read_bounded
from shared.model.spec import BadModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
MAX_TOKENIZER = 512 << 20
"""Bytes that are read of a tokenizer.json."""


class _Added(msgspec.Struct):
    id: int
    content: str


class _Kind(msgspec.Struct):
    type: str = "none"


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that a spec needs; msgspec skips the vocabulary without building it."""

    added_tokens: list[_Added] = []
    post_processor: Any = None
    decoder: _Kind | None = None
    model: _Kind | None = None


@dataclass(frozen=True)
class TokenizerFacts:
    """`added`: token text -> id. `prefix`: texts of the special tokens that encoding puts in front."""

    added: dict[str, int]
    prefix: tuple[str, ...]


def tokenizer_facts(path: Path) -> TokenizerFacts:
    """Reads tokenizer.json; BadModel when it is missing, malformed, or adds special tokens behind the text."""
    try:
        raw = msgspec.json.decode(read_bounded(path, MAX_TOKENIZER), type=_TokenizerFile)
    except FileNotFoundError:
        raise BadModel(
            f"{path.parent} has no {path.name}; convert the model's tokenizer to that format first"
        ) from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadModel(f"{path} is no tokenizer file: {error}") from None
    kinds = [part.type if part else "none" for part in (raw.model, raw.decoder)]
    if kinds != ["BPE", "ByteLevel"]:
        raise BadModel(
            f"{path}: model {kinds[0]} with decoder {kinds[1]} is not supported; known is byte-level BPE "
            "(model BPE, decoder ByteLevel)"
        )
    prefix: list[str] = []
    suffix: list[str] = []
    for template in _templates(raw.post_processor):
        side = prefix
        for item in template:
            if isinstance(item, dict) and "Sequence" in item:
                side = suffix
            elif isinstance(item, dict) and isinstance(item.get("SpecialToken"), dict):
                side.append(str(item["SpecialToken"].get("id")))
    if suffix:
        raise BadModel(f"{path}: the tokenizer appends {', '.join(suffix)} to every text, which is not supported")
    return TokenizerFacts({token.content: token.id for token in raw.added_tokens}, tuple(prefix))


def _templates(processor: Any) -> list[list[Any]]:
    """The `single` lists of all template processors in a (possibly nested) post-processor."""
    if not isinstance(processor, dict):
        return []
    if processor.get("type") == "Sequence" and isinstance(processor.get("processors"), list):
        return [found for inner in processor["processors"] for found in _templates(inner)]
    single = processor.get("single")
    return [single] if processor.get("type") == "TemplateProcessing" and isinstance(single, list) else []


def load_tokenizer(path: Path) -> "Tokenizer":
    """The directory's tokenizer; truncation and padding that the file may ask for are switched off."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path / FILE))
    except Exception as error:  # the library raises plain Exception
        raise BadModel(f"{path / FILE} can't be used: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class TokenizerTexts:
    """What tokenizer_config.json and chat_template.jinja say: special tokens by role, BOS, template."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = tokenizer_facts(path / FILE)
        self.config = JsonFile(path / "tokenizer_config.json", optional=True)
        self.texts: dict[str, str] = {}
        for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = self.config.values.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                self.texts[role] = text

    def id(self, role: str) -> int | None:
        """Token id of a role, or None when the file names none; BadModel when the tokenizer doesn't know it."""
        text = self.texts.get(role)
        if text is None:
            return None
        if text in self.facts.added:
            return self.facts.added[text]
        found = load_tokenizer(self.path).token_to_id(text)
        if found is None:
            raise BadModel(f"{self.config.path}: {role} {text!r} is not in the vocabulary")
        return int(found)

    def add_bos(self) -> bool:
        """Whether the tokenizer puts BOS in front of text; BadModel when it puts something else there."""
        if not self.facts.prefix:
            return False
        if self.facts.prefix != (self.texts.get("bos_token"),):
            raise BadModel(
                f"{self.path}: the tokenizer puts {', '.join(self.facts.prefix)} before every text, "
                f"its BOS is {self.texts.get('bos_token')}; not supported"
            )
        return True

    def chat_template(self) -> str | None:
        """chat_template.jinja, else the configuration's (of several: the one named default)."""
        try:
            return read_bounded(self.path / "chat_template.jinja", MAX_CONFIG).decode()
        except FileNotFoundError:
            pass
        except UnicodeDecodeError as error:
            raise BadModel(f"{self.path / 'chat_template.jinja'} is no UTF-8: {error.reason}") from None
        given: Any = self.config.values.get("chat_template")
        if isinstance(given, list):
            given = next((t.get("template") for t in given if isinstance(t, dict) and t.get("name") == "default"), None)
        return given if isinstance(given, str) else None

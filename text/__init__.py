"""Text in, text out: tokenizer, chat template, incremental detokenizer, stop strings. No torch."""

from kvferry.text.output import OutputText
from kvferry.text.pieces import TextStream
from kvferry.text.tokenizer import Tokenizer

__all__ = ["OutputText", "TextStream", "Tokenizer"]

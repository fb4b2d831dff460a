"""Tokenizers, folders of token ids, and rows packed from them."""

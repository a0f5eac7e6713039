"""Text for translation: vocabularies, packed records, beam search and BLEU."""

"""Text: vocabularies, packed rows, records, search for translations, and their score."""

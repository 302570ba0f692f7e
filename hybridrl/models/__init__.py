"""The loading of transformers models, and their forward over packed samples."""

"""Models, tokenizers, chat templates and adapters: everything that touches pretrained weights."""

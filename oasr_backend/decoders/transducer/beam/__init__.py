"""The modified beam search of a stateless transducer."""

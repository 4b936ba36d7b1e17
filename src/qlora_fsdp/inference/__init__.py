"""An adapter in use: a trained model is loaded, completes prompts, is merged, or is scored by lm-eval."""

"""What a chat template makes of a conversation, and which part of that is trained on."""

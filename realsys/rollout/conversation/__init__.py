"""Recorded conversations of an episode, and the rows that they become."""

from realsys.rollout.conversation.conversation import Conversation, Plan
from realsys.rollout.conversation.tree import Node

__all__ = ["Conversation", "Node", "Plan"]

"""SmolLaVA: a real vision tower, a real language model and real photos. Imports torch."""

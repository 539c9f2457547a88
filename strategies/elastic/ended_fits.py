"""The weights at the ends of `fit`s, for a worker that starts again and comes to a `fit` that is over."""

import dataclasses
import weakref

import keras

from tfdist.strategies.elastic.round_messages import Message


class EndedFits:
    """Keeps the weights of each living model at the end of its newest `fit`.

    Worker 0 has copied them for its members anyway. A reply must not read the model, which the next `fit` may train.
    Variables of the optimizer are not kept: a worker gets those of the present optimizer when it joins a later `fit`,
    and the model may have been compiled again.
    """

    def __init__(self) -> None:
        self._models: dict[int, weakref.ref[keras.Model]] = {}  # By the number of the `fit`.
        self._newest: weakref.WeakKeyDictionary[keras.Model, Message] = weakref.WeakKeyDictionary()
        self._last: Message | None = None

    def note(self, model: keras.Model | None, over: Message) -> None:
        """Notes the message about the end of a `fit`, and the weights in it unless the model is gone."""
        fields = {**over.fields, "has_optimizer": False}
        self._last = dataclasses.replace(over, fields=fields, arrays=())
        if model is not None:
            self._newest[model] = dataclasses.replace(over, fields=fields, arrays=over.arrays[: len(model.weights)])
            self._models[over.fields["fit"]] = weakref.ref(model)

    def over(self, fit: int) -> Message:
        """Returns the message to a worker that wants to join a `fit` that is over.

        It has the newest weights of the model of this `fit`, or none if the model is gone on worker 0.
        """
        assert self._last is not None
        found = self._models.get(fit)
        model = None if found is None else found()
        return self._last if model is None else self._newest.get(model, self._last)

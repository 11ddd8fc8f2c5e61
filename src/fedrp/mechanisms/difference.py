"""Send what has changed since the last aggregate: a whole model has too large numbers for few bits."""

from fedrp.mechanisms.base import AtClient, AtServer, Mechanism, Numbers


class Difference(Mechanism):
    """Takes the last aggregate off an update, and adds it to the mean; before there is one, nothing."""

    def client(self, upload: Numbers, context: AtClient) -> Numbers:
        """The difference."""
        return upload if context.previous is None else upload - context.previous[: upload.size]

    def server(self, numbers: Numbers, context: AtServer) -> Numbers:
        """The mean of the updates themselves."""
        return numbers if context.previous is None else numbers + context.previous[: numbers.size]

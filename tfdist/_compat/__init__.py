"""Private names of TensorFlow and Keras, call-stack lookups and version differences. No other module uses them.

The first import checks each private name and the installed versions.
"""

from tfdist._compat import library_versions, private_names

library_versions.refuse_failing_versions()
private_names.check_private_names()
library_versions.warn_of_untested_versions()

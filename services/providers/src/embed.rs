//! What vendors that turn texts into vectors have in common.

use construct_domain::money::Usage;
use futures::stream::{self, BoxStream, StreamExt as _, TryStreamExt as _};

use crate::{failure::Failure, vendor::Chunk};

/// All vectors of a call, and the tokens read where the vendor says.
pub(crate) type Embedded = (Vec<Vec<f32>>, Option<i64>);

/// An answer that comes at once, as the router takes it: vectors in their order, then what was used.
pub(crate) fn all(
    embedded: impl Future<Output = Result<Embedded, Failure>> + Send + 'static,
) -> BoxStream<'static, Result<Chunk, Failure>> {
    let chunks = async {
        let (vectors, tokens) = embedded.await?;
        let usage = tokens.map(|input_tokens| Chunk::Usage(Usage { input_tokens, ..Usage::default() }));
        Ok(stream::iter(vectors.into_iter().map(Chunk::Vector).chain(usage).map(Ok)))
    };
    stream::once(chunks).try_flatten().boxed()
}

/// Whether the vendor gave one vector for each text.
pub(crate) fn as_many(wanted: usize, given: usize) -> Result<(), Failure> {
    if wanted == given {
        return Ok(());
    }
    Err(Failure::transient(format!("the vendor gave {given} vectors for {wanted} texts")).after_success())
}

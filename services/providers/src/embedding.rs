//! What vendors with embedding models have in common.

use construct_domain::money::Usage;
use futures::stream::{self, BoxStream, StreamExt as _, TryStreamExt as _};

use crate::{failure::Failure, vendor::Chunk};

/// All vectors of a call, and the usage where the vendor reports it.
pub(crate) type EmbeddingResult = (Vec<Vec<f32>>, Option<Usage>);

/// The usage of `tokens` input tokens; none where the vendor has not counted.
pub(crate) fn input_usage(tokens: i64) -> Option<Usage> {
    (tokens > 0).then(|| Usage { input_tokens: tokens, ..Usage::default() })
}

/// Converts a complete response into chunks: the vectors in their order, then the usage.
pub(crate) fn vector_chunks(
    embedded: impl Future<Output = Result<EmbeddingResult, Failure>> + Send + 'static,
) -> BoxStream<'static, Result<Chunk, Failure>> {
    let chunks = async {
        let (vectors, used) = embedded.await?;
        Ok(stream::iter(
            vectors.into_iter().map(Chunk::Vector).chain(used.map(Chunk::Usage)).map(Ok),
        ))
    };
    stream::once(chunks).try_flatten().boxed()
}

/// Checks that the vendor returned one vector per text.
pub(crate) fn check_vector_count(wanted: usize, given: usize) -> Result<(), Failure> {
    if wanted == given {
        return Ok(());
    }
    Err(Failure::transient(format!("the vendor gave {given} vectors for {wanted} texts"))
        .after_success())
}

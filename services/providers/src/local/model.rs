//! A static embedding model: a vector per token; the vector of a text is their mean.

use std::{fs, io, path::Path};

use safetensors::{Dtype, SafeTensorError, SafeTensors, tensor::TensorView};
use serde::Deserialize;

use super::tokenizer::{self, Tokenizer};

/// Larger files are not loaded: they would take up to four times their size in memory.
const MAX_FILE_BYTES: u64 = 1024 * 1024 * 1024;

/// Why model files cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("`{file}` cannot be read")]
    Read { file: &'static str, source: io::Error },
    #[error("`{file}` is larger than {MAX_FILE_BYTES} bytes")]
    TooLarge { file: &'static str },
    #[error("`config.json` cannot be read")]
    Config(#[source] serde_json::Error),
    #[error("`tokenizer.json` cannot be used")]
    Tokenizer(#[from] tokenizer::Error),
    #[error("`model.safetensors` cannot be read")]
    Tensors(#[from] SafeTensorError),
    #[error("`model.safetensors` {0}")]
    Shape(String),
}

/// A model in memory.
pub(super) struct Model {
    tokenizer: Tokenizer,
    /// The vectors, one after the other.
    rows: Vec<f32>,
    width: usize,
    /// The weight of each token.
    weights: Option<Vec<f32>>,
    /// The row of each token, where several share one.
    mapping: Option<Vec<usize>>,
    /// Whether vectors are scaled to the length one.
    normalize: bool,
}

#[derive(Deserialize)]
struct Config {
    #[serde(default = "default_normalize")]
    normalize: bool,
}

const fn default_normalize() -> bool {
    true
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("width", &self.width)
            .field("numbers", &self.rows.len())
            .finish_non_exhaustive()
    }
}

impl Model {
    /// Loads a folder. Blocks.
    pub(super) fn load(folder: &Path) -> Result<Self, Error> {
        let tokenizer = Tokenizer::parse(&read(folder, "tokenizer.json")?)?;
        let config = match read(folder, "config.json") {
            Ok(text) => serde_json::from_slice(&text).map_err(Error::Config)?,
            Err(Error::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Config { normalize: true }
            }
            Err(error) => return Err(error),
        };
        let bytes = read(folder, "model.safetensors")?;
        let tensors = SafeTensors::deserialize(&bytes)?;
        // The second name is that of Sentence Transformers' static models.
        let table = tensors.tensor("embeddings").or_else(|_| tensors.tensor("embedding.weight"))?;
        let &[count, width] = table.shape() else {
            return Err(Error::Shape(format!(
                "has embeddings of the shape {:?} and not of two dimensions",
                table.shape()
            )));
        };
        let weights =
            optional_tensor(&tensors, "weights").map(|tensor| read_floats(&tensor)).transpose()?;
        let mapping =
            optional_tensor(&tensors, "mapping").map(|tensor| read_indices(&tensor)).transpose()?;
        let model = Self {
            tokenizer,
            rows: read_floats(&table)?,
            width,
            weights,
            mapping,
            normalize: config.normalize,
        };
        model.validate(count)?;
        Ok(model)
    }

    /// Checks that every token has its numbers, so that no text needs a row that does not exist.
    fn validate(&self, rows: usize) -> Result<(), Error> {
        let tokens = self.tokenizer.len();
        let enough = |what: &str, has: usize| {
            if has >= tokens {
                Ok(())
            } else {
                Err(Error::Shape(format!("has {has} {what} for {tokens} tokens")))
            }
        };
        if self.width == 0 {
            return Err(Error::Shape("has empty vectors".to_owned()));
        }
        if let Some(weights) = &self.weights {
            enough("weights", weights.len())?;
        }
        match &self.mapping {
            None => enough("vectors", rows),
            Some(mapping) => {
                enough("mappings", mapping.len())?;
                let beyond = mapping.iter().find(|&&row| row >= rows);
                beyond.map_or(Ok(()), |row| {
                    Err(Error::Shape(format!("maps a token to vector {row} of {rows}")))
                })
            }
        }
    }

    /// The vector of a text, with only its first `dimensions` numbers if set, and the number of
    /// tokens. Unknown words are ignored; a text without any known word has the zero vector.
    pub(super) fn embed(&self, text: &str, dimensions: Option<u32>) -> (Vec<f32>, usize) {
        let width = dimensions.map_or(self.width, |wanted| {
            usize::try_from(wanted).unwrap_or(self.width).min(self.width)
        });
        let mut sum = vec![0.0_f32; width];
        let mut tokens = 0_usize;
        self.tokenizer.for_each_token(text, |token| {
            let row = self.mapping.as_ref().map_or(token, |mapping| mapping[token]);
            let weight = self.weights.as_ref().map_or(1.0, |weights| weights[token]);
            let numbers = &self.rows[row * self.width..][..width];
            sum.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number * weight);
            tokens += 1;
        });
        // A vector that is normalized needs no mean.
        let length = if self.normalize {
            sum.iter().map(|number| f64::from(*number).powi(2)).sum::<f64>().sqrt()
        } else {
            f64::from(u32::try_from(tokens).unwrap_or(u32::MAX))
        };
        if length > 0.0 {
            // Single precision, as everything else here.
            sum.iter_mut().for_each(|number| *number = (f64::from(*number) / length) as f32);
        }
        (sum, tokens)
    }
}

fn read(folder: &Path, file: &'static str) -> Result<Vec<u8>, Error> {
    let path = folder.join(file);
    let failed = |source| Error::Read { file, source };
    if fs::metadata(&path).map_err(failed)?.len() > MAX_FILE_BYTES {
        return Err(Error::TooLarge { file });
    }
    fs::read(path).map_err(failed)
}

fn optional_tensor<'a>(tensors: &SafeTensors<'a>, name: &str) -> Option<TensorView<'a>> {
    tensors.tensor(name).ok()
}

/// The numbers of a tensor, which are stored in little-endian order.
fn read_floats(tensor: &TensorView<'_>) -> Result<Vec<f32>, Error> {
    let data = tensor.data();
    Ok(match tensor.dtype() {
        Dtype::F32 => data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        Dtype::F16 => {
            data.as_chunks().0.iter().map(|bytes| f16_to_f32(u16::from_le_bytes(*bytes))).collect()
        }
        Dtype::I8 => data.iter().map(|byte| f32::from(byte.cast_signed())).collect(),
        // Weights are stored with more digits than they have.
        Dtype::F64 => {
            data.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes) as f32).collect()
        }
        other => return Err(Error::Shape(format!("holds numbers of the type {other:?}"))),
    })
}

fn read_indices(tensor: &TensorView<'_>) -> Result<Vec<usize>, Error> {
    let data = tensor.data();
    let indices: Option<Vec<usize>> = match tensor.dtype() {
        Dtype::I64 => data
            .as_chunks()
            .0
            .iter()
            .map(|bytes| usize::try_from(i64::from_le_bytes(*bytes)).ok())
            .collect(),
        Dtype::I32 => data
            .as_chunks()
            .0
            .iter()
            .map(|bytes| usize::try_from(i32::from_le_bytes(*bytes)).ok())
            .collect(),
        other => return Err(Error::Shape(format!("holds a mapping of the type {other:?}"))),
    };
    indices.ok_or_else(|| Error::Shape("maps a token to a negative row".to_owned()))
}

/// Converts a half-precision number.
fn f16_to_f32(bits: u16) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f32::from(bits & 0x3ff) / 1_024.0);
    let size = match exponent {
        0 => fraction * 2.0_f32.powi(-14),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        exponent => (1.0 + fraction) * 2.0_f32.powi(exponent - 15),
    };
    if bits >> 15 == 1 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::f16_to_f32;

    #[test]
    fn half_precision_numbers_are_exact() {
        for (bits, number) in [
            (0x0000, 0.0),
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x3555, 0.333_251_95),
            (0x7bff, 65_504.0),
            (0x0001, 5.960_464_5e-8),
            (0x0400, 6.103_515_6e-5),
            (0x7c00, f32::INFINITY),
            (0xfc00, f32::NEG_INFINITY),
        ] {
            assert_eq!(f16_to_f32(bits).to_bits(), f32::to_bits(number), "{bits:#x}");
        }
        assert!(f16_to_f32(0x7e00).is_nan());
    }
}

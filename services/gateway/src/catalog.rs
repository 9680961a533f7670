//! The catalog of the vendors' models, `models.json`, parsed once.
//!
//! The catalog is dated and may be outdated: vendors change prices at any time. Its values are
//! copied to a model with their source, and change only when a person changes the model.

use std::sync::LazyLock;

use construct_domain::money::{LongContext, Prices, Rates};
use construct_proto::v1::{CatalogModel, ModelProviderType};
use serde::Deserialize;

use crate::convert;

#[derive(Deserialize)]
struct File {
    vendors: Vec<Vendor>,
}

/// The models of one type of provider.
#[derive(Deserialize)]
struct Vendor {
    r#type: String,
    models: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    /// The vendor's names of the model; all mean the same.
    names: Vec<String>,
    #[serde(default)]
    context_window: i64,
    #[serde(default)]
    max_output_tokens: i64,
    #[serde(default = "default_true")]
    tool_calling: bool,
    #[serde(default)]
    modalities: Vec<String>,
    prices: Dollars,
    source: String,
    date: String,
}

/// Dollars per million tokens, as the vendors write them.
#[derive(Deserialize)]
struct Dollars {
    input: f64,
    output: f64,
    #[serde(default)]
    cache_read: Option<f64>,
    #[serde(default)]
    cache_write: Option<f64>,
    #[serde(default)]
    above: Option<LongContextPrices>,
}

/// Prices for calls with a longer input.
#[derive(Deserialize)]
struct LongContextPrices {
    input_tokens: i64,
    input: f64,
    output: f64,
    #[serde(default)]
    cache_read: Option<f64>,
    #[serde(default)]
    cache_write: Option<f64>,
}

fn default_true() -> bool {
    true
}

/// The catalog, by type and name.
static MODELS: LazyLock<Vec<CatalogModel>> =
    LazyLock::new(|| parse(include_str!("../models.json")).expect("a test reads the same file"));

/// Every model.
pub(crate) fn models() -> &'static [CatalogModel] {
    &MODELS
}

/// The model with this vendor name. OpenAI's models are the same for all types of provider with its
/// protocol.
pub(crate) fn find_model(
    kind: ModelProviderType,
    vendor_model: &str,
) -> Option<&'static CatalogModel> {
    let kind =
        if kind == ModelProviderType::OpenaiResponses { ModelProviderType::Openai } else { kind };
    models().iter().find(|model| model.r#type() == kind && model.vendor_model == vendor_model)
}

fn parse(text: &str) -> Result<Vec<CatalogModel>, String> {
    let file: File = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let mut models = Vec::new();
    for vendor in file.vendors {
        let name = format!("MODEL_PROVIDER_TYPE_{}", vendor.r#type.to_uppercase());
        let kind = ModelProviderType::from_str_name(&name).ok_or(name)?;
        for entry in vendor.models {
            let prices = convert::prices(&prices(&entry.prices));
            models.extend(entry.names.iter().map(|name| CatalogModel {
                r#type: kind.into(),
                vendor_model: name.clone(),
                context_window: entry.context_window,
                max_output_tokens: entry.max_output_tokens,
                prices: Some(prices),
                tool_calling: entry.tool_calling,
                modalities: entry.modalities.clone(),
                source: entry.source.clone(),
                date: entry.date.clone(),
            }));
        }
    }
    models.sort_by(|a, b| (a.r#type, &a.vendor_model).cmp(&(b.r#type, &b.vendor_model)));
    Ok(models)
}

/// Prices in whole micro-dollars. Without a cache price, the input price applies.
fn prices(dollars: &Dollars) -> Prices {
    let micros = |dollars: f64| (dollars * 1e6).round() as i64;
    let long_context = dollars.above.as_ref().map(|above| LongContext {
        above_input_tokens: above.input_tokens,
        rates: Rates {
            input: micros(above.input),
            output: micros(above.output),
            cache_read: micros(above.cache_read.unwrap_or(above.input)),
            cache_write: micros(above.cache_write.unwrap_or(above.input)),
            thinking: 0,
        },
    });
    Prices {
        input: micros(dollars.input),
        output: micros(dollars.output),
        cache_read: micros(dollars.cache_read.unwrap_or(dollars.input)),
        cache_write: micros(dollars.cache_write.unwrap_or(dollars.input)),
        long_context,
        ..Prices::default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn catalog_lists_each_model_once_with_its_source() {
        let models = parse(include_str!("../models.json")).expect("it can be read");
        assert!(models.len() >= 60, "{}", models.len());
        let mut names = BTreeSet::new();
        for model in &models {
            assert!(
                names.insert((model.r#type, model.vendor_model.as_str())),
                "twice: {}",
                model.vendor_model
            );
            let prices = model.prices.expect("set");
            assert!(
                prices.input > 0 && prices.output >= prices.input / 2,
                "{}: {prices:?}",
                model.vendor_model
            );
            assert!(
                prices.cache_read <= prices.input && prices.cache_write >= prices.cache_read,
                "{}",
                model.vendor_model
            );
            if let Some(long) = prices.long_context {
                assert!(
                    long.above_input_tokens >= 100_000 && long.input > prices.input,
                    "{}",
                    model.vendor_model
                );
            }
            assert!(model.context_window == 0 || model.context_window >= model.max_output_tokens);
            assert!(model.source.starts_with("https://"), "{}", model.vendor_model);
            assert!(model.date.parse::<jiff::civil::Date>().is_ok(), "{}", model.date);
            let modalities = ["text", "image", "pdf"];
            assert!(
                model.modalities.iter().all(|what| modalities.contains(&what.as_str())),
                "{:?}",
                model.modalities
            );
        }
        let vendors: BTreeSet<i32> = models.iter().map(|model| model.r#type).collect();
        assert!(vendors.len() >= 7, "{vendors:?}");
    }

    #[test]
    fn model_is_found_by_its_vendor_name() {
        let opus =
            find_model(ModelProviderType::Anthropic, "claude-opus-4-5").expect("it is known");
        assert_eq!(opus.prices.expect("set").input, 5_000_000);
        assert_eq!(opus.max_output_tokens, 64_000);
        assert!(
            find_model(ModelProviderType::Openai, "claude-opus-4-5").is_none(),
            "another vendor's"
        );
        let model = find_model(ModelProviderType::Openai, "gpt-5.4").expect("it is known");
        assert_eq!(find_model(ModelProviderType::OpenaiResponses, "gpt-5.4"), Some(model));
        let long = model.prices.expect("set").long_context.expect("long inputs cost more");
        assert_eq!((long.above_input_tokens, long.input), (272_000, 5_000_000));
    }
}

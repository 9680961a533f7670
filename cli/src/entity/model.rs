//! Models.

use clap::{Args, Subcommand};
use construct_proto::v1::{
    Breaker, CatalogModel, CreateModelRequest, DeleteModelRequest, GetModelRequest,
    ListCatalogModelsRequest, ListModelsRequest, LongContextPrices, Model, ModelFallback,
    ModelFallbacks, ModelProviderType, ModelSpec, Prices, PricesSource, UpdateModelRequest,
    breaker::State, list_models_request::Filter,
};
use jiff::Timestamp;

use super::model_provider::{Type, type_name};
use super::{ChangeArgs, WriteArgs, age, id, metadata_details};
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    money,
    output::{Entity, OutputArgs},
    page::{ListArgs, Page},
    text::thousands,
};

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Create a model.
    Create(Create),
    /// Show a model.
    Get {
        /// Name or id.
        model: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List models.
    List(List),
    /// Change the given fields of a model.
    Update(Update),
    /// List the catalog of vendors' models with limits and prices.
    Catalog(Catalog),
    /// Delete a model that no agent uses.
    Delete {
        /// Name or id.
        model: String,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    /// Lowercase letters, digits, `.`, `_` and `-`.
    name: String,
    /// Name or id of the provider.
    #[arg(long)]
    provider: String,
    #[command(flatten)]
    fields: Fields,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only models of this provider.
    #[arg(long, default_value = "", hide_default_value = true)]
    provider: String,
    /// Only models whose name starts with this.
    #[arg(long, value_name = "PREFIX", default_value = "", hide_default_value = true)]
    name_prefix: String,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Catalog {
    /// Only models of this provider type.
    #[arg(value_enum, value_name = "TYPE")]
    vendor: Option<Type>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Update {
    /// Name or id.
    model: String,
    /// The new name.
    #[arg(long)]
    name: Option<String>,
    /// Remove all fallbacks.
    #[arg(long, conflicts_with = "fallbacks")]
    no_fallbacks: bool,
    #[command(flatten)]
    fields: Fields,
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct Fields {
    /// The vendor's name of the model. Default: the name.
    #[arg(long, visible_alias = "model-id", value_name = "NAME")]
    vendor_model: Option<String>,
    /// The context window. Default: that of the catalog, or 128,000.
    #[arg(long, value_name = "TOKENS")]
    context_window: Option<i64>,
    /// The maximum tokens of an answer. Default: that of the catalog, or 8,192.
    #[arg(long, value_name = "TOKENS")]
    max_output_tokens: Option<i64>,
    /// Dollars per million input tokens. Without any price, the catalog's prices apply.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    input_price: Option<i64>,
    /// Dollars per million output tokens.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    output_price: Option<i64>,
    /// Dollars per million tokens read from the vendor's cache. Default: the input price.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    cache_read_price: Option<i64>,
    /// Dollars per million tokens written to the vendor's cache. Default: the input price.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    cache_write_price: Option<i64>,
    /// Dollars per million thinking tokens. Default: the output price.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    thinking_price: Option<i64>,
    /// Dollars per call, in addition to its tokens.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    request_price: Option<i64>,
    /// Prices of calls with a long input, in dollars per million tokens:
    /// `above=TOKENS,input=DOLLARS, output=DOLLARS` without spaces, and optional `cache-read`,
    /// `cache-write` and `thinking`.
    #[arg(long, value_name = "PRICES", value_parser = parse_long_context)]
    long_context: Option<LongContextPrices>,
    /// Whether the model supports tool calls. Default: true. Other models write scripts in fenced
    /// blocks.
    #[arg(long, value_name = "BOOL")]
    tool_calling: Option<bool>,
    /// A fallback model for when this one fails. Repeatable, at most 8, in the order of attempts.
    /// Adjacent fallbacks with a weight (1 to 1,000) are a group, tried in weighted random order.
    #[arg(long = "fallback", value_name = "MODEL[=WEIGHT]", value_parser = parse_fallback)]
    fallbacks: Vec<ModelFallback>,
    /// Start a hedge with the next fallback when no part of the answer has arrived after this time,
    /// e.g. `3s` or `800ms`; 0 is never.
    #[arg(long, value_name = "DURATION", value_parser = parse_hedge)]
    hedge_after: Option<prost_types::Duration>,
}

fn parse_fallback(text: &str) -> Result<ModelFallback, String> {
    let (model, weight) = match text.split_once('=') {
        Some((model, weight)) => (
            model,
            weight
                .parse()
                .map_err(|_| format!("`{weight}` is not a weight: use a number from 0 to 1000"))?,
        ),
        None => (text, 0),
    };
    Ok(ModelFallback { model: model.to_owned(), weight })
}

fn parse_hedge(text: &str) -> Result<prost_types::Duration, String> {
    let invalid = || format!("`{text}` is not a duration such as `3s` or `800ms`");
    let (number, unit) = match text.trim_end_matches(|c: char| c.is_ascii_alphabetic()) {
        "0" => ("0", 1),
        number => match &text[number.len()..] {
            "ms" => (number, 1),
            "s" => (number, 1_000),
            _ => return Err(invalid()),
        },
    };
    let millis = number
        .parse::<i64>()
        .ok()
        .and_then(|number| number.checked_mul(unit))
        .ok_or_else(invalid)?;
    let nanos = i32::try_from(millis % 1_000 * 1_000_000).map_err(|_| invalid())?;
    Ok(prost_types::Duration { seconds: millis / 1_000, nanos })
}

impl Fields {
    fn has_prices(&self) -> bool {
        let prices = [
            self.input_price,
            self.output_price,
            self.cache_read_price,
            self.cache_write_price,
            self.thinking_price,
            self.request_price,
        ];
        self.long_context.is_some() || prices.iter().any(Option::is_some)
    }

    /// The given prices, with the others from `base`.
    fn merge_prices(&self, base: Prices) -> Prices {
        Prices {
            input: self.input_price.unwrap_or(base.input),
            output: self.output_price.unwrap_or(base.output),
            cache_read: self.cache_read_price.unwrap_or(base.cache_read),
            cache_write: self.cache_write_price.unwrap_or(base.cache_write),
            thinking: self.thinking_price.unwrap_or(base.thinking),
            request: self.request_price.unwrap_or(base.request),
            long_context: self.long_context.or(base.long_context),
        }
    }
}

impl ModelCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(args) => args.run(gateway).await,
            Self::Get { model, output } => output.entity(&get(gateway, model).await?),
            Self::List(args) => args.run(gateway).await,
            Self::Update(args) => args.run(gateway).await,
            Self::Catalog(args) => args.run(gateway).await,
            Self::Delete { model, write, output } => {
                let request =
                    DeleteModelRequest { model: model.clone(), idempotency_key: write.key() };
                call(gateway.models().delete_model(request)).await?;
                output.deleted("model", &model)
            }
        }
    }
}

impl Create {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let prices = self.fields.has_prices().then(|| self.fields.merge_prices(Prices::default()));
        let spec = ModelSpec {
            name: self.name,
            provider: self.provider,
            vendor_model: self.fields.vendor_model.unwrap_or_default(),
            context_window: self.fields.context_window.unwrap_or(0),
            max_output_tokens: self.fields.max_output_tokens.unwrap_or(0),
            prices,
            tool_calling: self.fields.tool_calling,
            fallbacks: self.fields.fallbacks,
            hedge_after: self.fields.hedge_after,
        };
        let request = CreateModelRequest { spec: Some(spec), idempotency_key: self.write.key() };
        self.output.entity(&call(gateway.models().create_model(request)).await?)
    }
}

impl List {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let filter = Filter { provider: self.provider, name_prefix: self.name_prefix };
        let listed = self
            .list
            .collect(|page| {
                let request = ListModelsRequest { page: Some(page), filter: Some(filter.clone()) };
                async move {
                    let response = call(gateway.models().list_models(request)).await?;
                    Ok((response.models, response.page))
                }
            })
            .await?;
        self.output.list(&listed)
    }
}

impl Update {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let mut revision = self.change.revision;
        let mut prices = None;
        if self.fields.has_prices() {
            // The API replaces all prices: the others come from the current model.
            let current = get(gateway, self.model.clone()).await?;
            if revision == 0 {
                revision = current.metadata.as_ref().map_or(0, |metadata| metadata.revision);
            }
            prices = Some(
                self.fields
                    .merge_prices(current.spec.and_then(|spec| spec.prices).unwrap_or_default()),
            );
        }
        let fallbacks = self.fields.fallbacks;
        let replaced = self.no_fallbacks || !fallbacks.is_empty();
        let request = UpdateModelRequest {
            model: self.model,
            fallbacks: replaced.then_some(ModelFallbacks { fallbacks }),
            hedge_after: self.fields.hedge_after,
            name: self.name,
            vendor_model: self.fields.vendor_model,
            context_window: self.fields.context_window,
            max_output_tokens: self.fields.max_output_tokens,
            tool_calling: self.fields.tool_calling,
            prices,
            revision,
            idempotency_key: self.change.write.key(),
        };
        self.output.entity(&call(gateway.models().update_model(request)).await?)
    }
}

impl Catalog {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let kind = self.vendor.map_or(ModelProviderType::Unspecified, ModelProviderType::from);
        let request = ListCatalogModelsRequest { r#type: kind.into() };
        let items = call(gateway.models().list_catalog_models(request)).await?.models;
        self.output.list(&Page { items, next_page_token: String::new() })
    }
}

/// Parses the prices of calls with a long input.
fn parse_long_context(text: &str) -> Result<LongContextPrices, String> {
    const INVALID: &str =
        "write above=TOKENS,input=DOLLARS,output=DOLLARS and optional further prices";
    let mut prices = LongContextPrices::default();
    let (mut cache_read, mut cache_write) = (None, None);
    for part in text.split(',') {
        let (name, value) = part.split_once('=').ok_or(INVALID)?;
        match name {
            "above" => prices.above_input_tokens = value.parse().map_err(|_| INVALID)?,
            "input" => prices.input = money::parse_price(value)?,
            "output" => prices.output = money::parse_price(value)?,
            "cache-read" => cache_read = Some(money::parse_price(value)?),
            "cache-write" => cache_write = Some(money::parse_price(value)?),
            "thinking" => prices.thinking = money::parse_price(value)?,
            _ => return Err(INVALID.to_owned()),
        }
    }
    if prices.above_input_tokens <= 0 || prices.input == 0 || prices.output == 0 {
        return Err(INVALID.to_owned());
    }
    prices.cache_read = cache_read.unwrap_or(prices.input);
    prices.cache_write = cache_write.unwrap_or(prices.input);
    Ok(prices)
}

fn describe_source(source: PricesSource) -> &'static str {
    match source {
        PricesSource::Unspecified => "",
        PricesSource::Given => "given",
        PricesSource::Catalog => "from the catalog, when the model was created",
        PricesSource::Free => "free of charge",
        PricesSource::Unknown => "UNKNOWN: calls count as free, and no budget limits them",
    }
}

async fn get(gateway: &Gateway, model: String) -> Result<Model, Failure> {
    call(gateway.models().get_model(GetModelRequest { model })).await
}

impl Entity for Model {
    const NAME: &'static str = "construct.v1.Model";
    const PLURAL: &'static str = "models";
    const COLUMNS: &'static [&'static str] =
        &["NAME", "PROVIDER", "VENDOR MODEL", "CONTEXT", "IN/M", "OUT/M", "AGE"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let spec = self.spec.clone().unwrap_or_default();
        let prices = spec.prices.unwrap_or_default();
        let unknown = self
            .status
            .as_ref()
            .is_some_and(|status| status.prices_source() == PricesSource::Unknown);
        let price = |micros| if unknown { "?".to_owned() } else { money::price(micros) };
        vec![
            spec.name,
            spec.provider,
            spec.vendor_model,
            thousands(spec.context_window),
            price(prices.input),
            price(prices.output),
            age(self.metadata.as_ref(), now),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let spec = self.spec.clone().unwrap_or_default();
        let prices = spec.prices.unwrap_or_default();
        let source = self.status.as_ref().map(|status| status.prices_source()).unwrap_or_default();
        let long = prices.long_context.map_or_else(String::new, |long| {
            let above = thousands(long.above_input_tokens);
            let (input, output) = (money::price(long.input), money::price(long.output));
            format!("above {above} tokens {input} input, {output} output")
        });
        let per_million = |micros| format!("{} per million tokens", money::price(micros));
        let unless_free = |micros| if micros == 0 { String::new() } else { per_million(micros) };
        let mut details = vec![
            ("name", spec.name),
            ("id", id(self.metadata.as_ref())),
            ("provider", spec.provider),
            ("vendor model", spec.vendor_model),
            ("context window", format!("{} tokens", thousands(spec.context_window))),
            ("max output", format!("{} tokens", thousands(spec.max_output_tokens))),
            ("input", per_million(prices.input)),
            ("output", per_million(prices.output)),
            ("cache read", per_million(prices.cache_read)),
            ("cache write", per_million(prices.cache_write)),
            ("thinking", unless_free(prices.thinking)),
            (
                "per call",
                if prices.request == 0 { String::new() } else { money::price(prices.request) },
            ),
            ("long inputs", long),
            ("prices", describe_source(source).to_owned()),
            (
                "tool calling",
                if spec.tool_calling.unwrap_or(true) { "yes" } else { "no: fenced blocks" }
                    .to_owned(),
            ),
        ];
        if !spec.fallbacks.is_empty() {
            details.push((
                "fallbacks",
                spec.fallbacks.iter().map(fallback).collect::<Vec<_>>().join(", "),
            ));
        }
        if let Some(after) = spec.hedge_after {
            let seconds = format!("{}.{:03}", after.seconds, after.nanos / 1_000_000);
            details.push((
                "hedge after",
                format!("{} s", seconds.trim_end_matches('0').trim_end_matches('.')),
            ));
        }
        if let Some(breaker) = self.status.as_ref().and_then(|status| status.breaker.as_ref()) {
            details.push(("breaker", describe_breaker(breaker, now)));
        }
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}

impl Entity for CatalogModel {
    const NAME: &'static str = "construct.v1.CatalogModel";
    const PLURAL: &'static str = "models";
    const COLUMNS: &'static [&'static str] = &[
        "TYPE",
        "VENDOR MODEL",
        "CONTEXT",
        "MAX OUT",
        "IN/M",
        "OUT/M",
        "CACHED/M",
        "TOOLS",
        "MODALITIES",
        "DATE",
    ];

    fn row(&self, _now: Timestamp) -> Vec<String> {
        let prices = self.prices.unwrap_or_default();
        let tokens_or_unknown =
            |tokens: i64| if tokens == 0 { "?".to_owned() } else { thousands(tokens) };
        vec![
            type_name(self.r#type()).to_owned(),
            self.vendor_model.clone(),
            tokens_or_unknown(self.context_window),
            tokens_or_unknown(self.max_output_tokens),
            money::price(prices.input),
            money::price(prices.output),
            money::price(prices.cache_read),
            if self.tool_calling { "yes" } else { "no" }.to_owned(),
            self.modalities.join(", "),
            self.date.clone(),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let mut details: Vec<_> = Self::COLUMNS.iter().copied().zip(self.row(now)).collect();
        details.push(("SOURCE", self.source.clone()));
        details
    }
}

fn fallback(fallback: &ModelFallback) -> String {
    match fallback.weight {
        0 => fallback.model.clone(),
        weight => format!("{} (weight {weight})", fallback.model),
    }
}

fn describe_breaker(breaker: &Breaker, now: Timestamp) -> String {
    match breaker.state() {
        State::Unspecified => "unknown".to_owned(),
        State::Closed if breaker.failures == 0 => "closed".to_owned(),
        State::Closed => format!("closed, {} failures in a row", breaker.failures),
        State::HalfOpen => "half-open: a probe checks whether the vendor has recovered".to_owned(),
        State::Open => {
            let seconds = breaker.retry_at.map_or(0, |at| at.seconds - now.as_second()).max(0);
            format!(
                "open: the vendor failed {} times in a row; next call in {seconds} s",
                breaker.failures
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_context_prices_default_to_the_input_price() {
        let prices = parse_long_context("above=200000,input=6,output=22.5,cache-read=0.6")
            .expect("valid prices");
        assert_eq!(
            (prices.above_input_tokens, prices.input, prices.output),
            (200_000, 6_000_000, 22_500_000)
        );
        assert_eq!(
            (prices.cache_read, prices.cache_write, prices.thinking),
            (600_000, 6_000_000, 0)
        );
        for text in [
            "",
            "above=1",
            "above=0,input=1,output=1",
            "above=9,input=1,output=1,other=1",
            "input=1,output=1",
        ] {
            assert!(parse_long_context(text).is_err(), "{text}");
        }
    }

    #[test]
    fn hedge_delay_needs_a_unit() {
        let parsed = |text| parse_hedge(text).map(|after| (after.seconds, after.nanos)).ok();
        assert_eq!(parsed("3s"), Some((3, 0)));
        assert_eq!(parsed("1800ms"), Some((1, 800_000_000)));
        assert_eq!(parsed("0"), Some((0, 0)));
        assert_eq!([parsed("3"), parsed("s"), parsed("3h"), parsed("-x")], [None; 4]);
    }

    #[test]
    fn fallback_has_an_optional_weight() {
        assert_eq!(parse_fallback("a"), Ok(ModelFallback { model: "a".into(), weight: 0 }));
        assert_eq!(parse_fallback("a=30"), Ok(ModelFallback { model: "a".into(), weight: 30 }));
        assert!(parse_fallback("a=b").is_err());
    }
}

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
    page::{ListArgs, Listed},
    words::thousands,
};

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Make a model known.
    Create(Create),
    /// Show one.
    Get {
        /// Name or id.
        model: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List them.
    List(List),
    /// Change one: only what is given.
    Update(Update),
    /// List the vendors' models that Construct knows, with limits and prices.
    Catalog(Catalog),
    /// Delete one that no agent uses.
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
    /// Lower-case letters, digits, `.`, `_` and `-`.
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
    /// Only those of this provider.
    #[arg(long, default_value = "", hide_default_value = true)]
    provider: String,
    /// Only those whose name begins like this.
    #[arg(long, value_name = "PREFIX", default_value = "", hide_default_value = true)]
    name_prefix: String,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Catalog {
    /// Only those of this type of provider.
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
    /// Have no fallbacks any more.
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
    /// What the vendor calls the model; its name when not given.
    #[arg(long, visible_alias = "model-id", value_name = "NAME")]
    vendor_model: Option<String>,
    /// Tokens the model can see; what the catalog has when not given, else 128,000.
    #[arg(long, value_name = "TOKENS")]
    context_window: Option<i64>,
    /// Tokens of one answer at most; what the catalog has when not given, else 8,192.
    #[arg(long, value_name = "TOKENS")]
    max_output_tokens: Option<i64>,
    /// Dollars per million input tokens. Without any price: those of the catalog.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    input_price: Option<i64>,
    /// Dollars per million output tokens.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    output_price: Option<i64>,
    /// Dollars per million tokens read from the vendor's cache; the price of input when not given.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    cache_read_price: Option<i64>,
    /// Dollars per million tokens written to the vendor's cache; the price of input when not given.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    cache_write_price: Option<i64>,
    /// Dollars per million tokens spent on thinking; the price of output when not given.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    thinking_price: Option<i64>,
    /// Dollars per call, besides its tokens.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    request_price: Option<i64>,
    /// Prices of calls with a longer input, in dollars per million tokens:
    /// `above=TOKENS,input=DOLLARS,output=DOLLARS[,cache-read=DOLLARS][,cache-write=DOLLARS][,thinking=DOLLARS]`.
    #[arg(long, value_name = "PRICES", value_parser = parse_long_context)]
    long_context: Option<LongContextPrices>,
    /// Whether the model can call tools; true when not given. One that cannot is asked for scripts
    /// in fenced blocks.
    #[arg(long, value_name = "BOOL")]
    tool_calling: Option<bool>,
    /// A model that answers when this one cannot, may be repeated (at most 8), in the order they
    /// are tried. Neighbors with a weight (1 to 1,000) are a group, of which is drawn who comes
    /// first.
    #[arg(long = "fallback", value_name = "MODEL[=WEIGHT]", value_parser = parse_fallback)]
    fallbacks: Vec<ModelFallback>,
    /// Ask the next fallback as well when nothing of the answer has come after this time, e.g. `3s`
    /// or `800ms`; 0 is never.
    #[arg(long, value_name = "DURATION", value_parser = parse_hedge)]
    hedge_after: Option<prost_types::Duration>,
}

fn parse_fallback(text: &str) -> Result<ModelFallback, String> {
    let (model, weight) = match text.split_once('=') {
        Some((model, weight)) => (
            model,
            weight
                .parse()
                .map_err(|_| format!("`{weight}` is no weight: use a number from 0 to 1000"))?,
        ),
        None => (text, 0),
    };
    Ok(ModelFallback { model: model.to_owned(), weight })
}

fn parse_hedge(text: &str) -> Result<prost_types::Duration, String> {
    let wrong = || format!("`{text}` is no duration such as `3s` or `800ms`");
    let (number, unit) = match text.trim_end_matches(|c: char| c.is_ascii_alphabetic()) {
        "0" => ("0", 1),
        number => match &text[number.len()..] {
            "ms" => (number, 1),
            "s" => (number, 1_000),
            _ => return Err(wrong()),
        },
    };
    let millis =
        number.parse::<i64>().ok().and_then(|number| number.checked_mul(unit)).ok_or_else(wrong)?;
    let nanos = i32::try_from(millis % 1_000 * 1_000_000).map_err(|_| wrong())?;
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

    /// What is given, and the rest as before.
    fn prices(&self, before: Prices) -> Prices {
        Prices {
            input: self.input_price.unwrap_or(before.input),
            output: self.output_price.unwrap_or(before.output),
            cache_read: self.cache_read_price.unwrap_or(before.cache_read),
            cache_write: self.cache_write_price.unwrap_or(before.cache_write),
            thinking: self.thinking_price.unwrap_or(before.thinking),
            request: self.request_price.unwrap_or(before.request),
            long_context: self.long_context.or(before.long_context),
        }
    }
}

impl ModelCommand {
    /// # Errors
    /// What the gateway fails with.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(args) => args.run(gateway).await,
            Self::Get { model, output } => output.one(&get(gateway, model).await?),
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
        let prices = self.fields.has_prices().then(|| self.fields.prices(Prices::default()));
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
        self.output.one(&call(gateway.models().create_model(request)).await?)
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
            // Prices are replaced as a whole, so those that are not given are taken from what is
            // there.
            let before = get(gateway, self.model.clone()).await?;
            if revision == 0 {
                revision = before.metadata.as_ref().map_or(0, |metadata| metadata.revision);
            }
            prices = Some(
                self.fields.prices(before.spec.and_then(|spec| spec.prices).unwrap_or_default()),
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
        self.output.one(&call(gateway.models().update_model(request)).await?)
    }
}

impl Catalog {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let kind = self.vendor.map_or(ModelProviderType::Unspecified, ModelProviderType::from);
        let request = ListCatalogModelsRequest { r#type: kind.into() };
        let items = call(gateway.models().list_catalog_models(request)).await?.models;
        self.output.list(&Listed { items, next_page_token: String::new() })
    }
}

/// Prices of calls with a longer input.
fn parse_long_context(text: &str) -> Result<LongContextPrices, String> {
    const WRONG: &str =
        "write above=TOKENS,input=DOLLARS,output=DOLLARS and what else has a price of its own";
    let mut prices = LongContextPrices::default();
    let (mut cache_read, mut cache_write) = (None, None);
    for part in text.split(',') {
        let (name, value) = part.split_once('=').ok_or(WRONG)?;
        match name {
            "above" => prices.above_input_tokens = value.parse().map_err(|_| WRONG)?,
            "input" => prices.input = money::parse_price(value)?,
            "output" => prices.output = money::parse_price(value)?,
            "cache-read" => cache_read = Some(money::parse_price(value)?),
            "cache-write" => cache_write = Some(money::parse_price(value)?),
            "thinking" => prices.thinking = money::parse_price(value)?,
            _ => return Err(WRONG.to_owned()),
        }
    }
    if prices.above_input_tokens <= 0 || prices.input == 0 || prices.output == 0 {
        return Err(WRONG.to_owned());
    }
    prices.cache_read = cache_read.unwrap_or(prices.input);
    prices.cache_write = cache_write.unwrap_or(prices.input);
    Ok(prices)
}

fn source_words(source: PricesSource) -> &'static str {
    match source {
        PricesSource::Unspecified => "",
        PricesSource::Given => "given",
        PricesSource::Catalog => "from the catalog, when the model was created",
        PricesSource::Free => "nobody asks for money",
        PricesSource::Unknown => "UNKNOWN: calls are counted as free, and no budget stops them",
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
            ("prices", source_words(source).to_owned()),
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
            details.push(("breaker", breaker_words(breaker, now)));
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
        "SEES",
        "DATE",
    ];

    fn row(&self, _now: Timestamp) -> Vec<String> {
        let prices = self.prices.unwrap_or_default();
        let known = |tokens: i64| if tokens == 0 { "?".to_owned() } else { thousands(tokens) };
        vec![
            type_name(self.r#type()).to_owned(),
            self.vendor_model.clone(),
            known(self.context_window),
            known(self.max_output_tokens),
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

fn breaker_words(breaker: &Breaker, now: Timestamp) -> String {
    match breaker.state() {
        State::Unspecified => "unknown".to_owned(),
        State::Closed if breaker.failures == 0 => "closed".to_owned(),
        State::Closed => format!("closed, {} failures in a row", breaker.failures),
        State::HalfOpen => "half open: one call tries whether the vendor is well again".to_owned(),
        State::Open => {
            let left = breaker.retry_at.map_or(0, |at| at.seconds - now.as_second()).max(0);
            format!(
                "open: the vendor failed {} times in a row; next call in {left} s",
                breaker.failures
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_of_long_inputs_are_read_and_what_has_none_of_its_own_costs_as_input() {
        let read = parse_long_context("above=200000,input=6,output=22.5,cache-read=0.6")
            .expect("it can be read");
        assert_eq!(
            (read.above_input_tokens, read.input, read.output),
            (200_000, 6_000_000, 22_500_000)
        );
        assert_eq!((read.cache_read, read.cache_write, read.thinking), (600_000, 6_000_000, 0));
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
    fn a_hedge_is_a_number_with_a_unit() {
        let parsed = |text| parse_hedge(text).map(|after| (after.seconds, after.nanos)).ok();
        assert_eq!(parsed("3s"), Some((3, 0)));
        assert_eq!(parsed("1800ms"), Some((1, 800_000_000)));
        assert_eq!(parsed("0"), Some((0, 0)));
        assert_eq!([parsed("3"), parsed("s"), parsed("3h"), parsed("-x")], [None; 4]);
    }

    #[test]
    fn a_fallback_may_have_a_weight() {
        assert_eq!(parse_fallback("a"), Ok(ModelFallback { model: "a".into(), weight: 0 }));
        assert_eq!(parse_fallback("a=30"), Ok(ModelFallback { model: "a".into(), weight: 30 }));
        assert!(parse_fallback("a=b").is_err());
    }
}

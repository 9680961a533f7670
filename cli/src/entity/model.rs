//! Models.

use clap::{Args, Subcommand};
use construct_proto::v1::{
    CreateModelRequest, DeleteModelRequest, GetModelRequest, ListModelsRequest, Model, ModelSpec, Prices,
    UpdateModelRequest, list_models_request::Filter,
};
use jiff::Timestamp;

use super::{ChangeArgs, WriteArgs, age, id, metadata_details};
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    money,
    output::{Entity, OutputArgs},
    page::ListArgs,
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
pub(crate) struct Update {
    /// Name or id.
    model: String,
    /// The new name.
    #[arg(long)]
    name: Option<String>,
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
    /// Tokens the model can see; 128,000 when not given.
    #[arg(long, value_name = "TOKENS")]
    context_window: Option<i64>,
    /// Tokens of one answer at most; 8,192 when not given.
    #[arg(long, value_name = "TOKENS")]
    max_output_tokens: Option<i64>,
    /// Dollars per million input tokens.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    input_price: Option<i64>,
    /// Dollars per million output tokens.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    output_price: Option<i64>,
    /// Dollars per million tokens read from the vendor's cache.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    cache_read_price: Option<i64>,
    /// Dollars per million tokens written to the vendor's cache.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    cache_write_price: Option<i64>,
    /// Whether the model can call tools; true when not given. One that cannot is asked for scripts in fenced blocks.
    #[arg(long, value_name = "BOOL")]
    tool_calling: Option<bool>,
}

impl Fields {
    fn has_prices(&self) -> bool {
        [self.input_price, self.output_price, self.cache_read_price, self.cache_write_price].iter().any(Option::is_some)
    }

    /// What is given, and the rest as before.
    fn prices(&self, before: Prices) -> Prices {
        Prices {
            input: self.input_price.unwrap_or(before.input),
            output: self.output_price.unwrap_or(before.output),
            cache_read: self.cache_read_price.unwrap_or(before.cache_read),
            cache_write: self.cache_write_price.unwrap_or(before.cache_write),
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
            Self::Delete { model, write, output } => {
                let request = DeleteModelRequest { model: model.clone(), idempotency_key: write.key() };
                call(gateway.models().delete_model(request)).await?;
                output.deleted("model", &model)
            }
        }
    }
}

impl Create {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let prices = self.fields.prices(Prices::default());
        let spec = ModelSpec {
            name: self.name,
            provider: self.provider,
            vendor_model: self.fields.vendor_model.unwrap_or_default(),
            context_window: self.fields.context_window.unwrap_or(0),
            max_output_tokens: self.fields.max_output_tokens.unwrap_or(0),
            prices: Some(prices),
            tool_calling: self.fields.tool_calling,
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
            // Prices are replaced as a whole, so those that are not given are taken from what is there.
            let before = get(gateway, self.model.clone()).await?;
            if revision == 0 {
                revision = before.metadata.as_ref().map_or(0, |metadata| metadata.revision);
            }
            prices = Some(self.fields.prices(before.spec.and_then(|spec| spec.prices).unwrap_or_default()));
        }
        let request = UpdateModelRequest {
            model: self.model,
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

async fn get(gateway: &Gateway, model: String) -> Result<Model, Failure> {
    call(gateway.models().get_model(GetModelRequest { model })).await
}

impl Entity for Model {
    const NAME: &'static str = "construct.v1.Model";
    const PLURAL: &'static str = "models";
    const COLUMNS: &'static [&'static str] = &["NAME", "PROVIDER", "VENDOR MODEL", "CONTEXT", "IN/M", "OUT/M", "AGE"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let spec = self.spec.clone().unwrap_or_default();
        let prices = spec.prices.unwrap_or_default();
        vec![
            spec.name,
            spec.provider,
            spec.vendor_model,
            thousands(spec.context_window),
            money::price(prices.input),
            money::price(prices.output),
            age(self.metadata.as_ref(), now),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let spec = self.spec.clone().unwrap_or_default();
        let prices = spec.prices.unwrap_or_default();
        let per_million = |micros| format!("{} per million tokens", money::price(micros));
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
            ("tool calling", if spec.tool_calling.unwrap_or(true) { "yes" } else { "no: fenced blocks" }.to_owned()),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}

use super::*;
use warmroute_proto::{BlockSize, Seed};

fn prompt(tokens: u32) -> Prompt {
    let tokens: Vec<u32> = (0..tokens).collect();
    Prompt::new(&tokens, BlockSize::new(16).unwrap(), Seed::PLAIN)
}

const fn tiers(gpu: u32, cpu: u32, disk: u32) -> Tiers<u32> {
    Tiers { gpu, cpu, disk }
}

#[test]
fn credit_is_capped_from_the_last_tier_on() {
    assert_eq!(capped(tiers(4, 3, 2), 9), tiers(4, 3, 2));
    assert_eq!(capped(tiers(4, 3, 2), 8), tiers(4, 3, 1));
    assert_eq!(capped(tiers(4, 3, 2), 6), tiers(4, 2, 0));
    assert_eq!(capped(tiers(4, 3, 2), 3), tiers(3, 0, 0));
    assert_eq!(
        capped(tiers(u32::MAX, u32::MAX, u32::MAX), 3),
        tiers(3, 0, 0)
    );
}

#[test]
fn header_and_cost_count_the_same_capped_credit() {
    // Four whole blocks are held, but the last token is always computed.
    let prompt = prompt(64);
    let credit = capped(tiers(4, 0, 0), prompt.credit_max());
    assert_eq!(overlap_blocks(credit), 3);
    let value = overlap_value(credit, Knobs::default().tier_weights);
    assert_eq!(prefill_blocks(0, &prompt, value), 1.0);
}

#[test]
fn lower_tiers_save_less() {
    let weights = Knobs::default().tier_weights;
    assert_eq!(overlap_value(tiers(10, 0, 0), weights), 10.0);
    assert_eq!(overlap_value(tiers(0, 10, 0), weights), 8.0);
    assert_eq!(overlap_value(tiers(0, 0, 10), weights), 3.0);
    assert_eq!(overlap_value(tiers(10, 10, 10), weights), 21.0);
}

#[test]
fn prefill_counts_what_waits_there_and_this_prompt() {
    assert_eq!(prefill_blocks(0, &prompt(64), 0.0), 4.0);
    assert_eq!(prefill_blocks(160, &prompt(64), 0.0), 14.0);
    assert_eq!(prefill_blocks(160, &prompt(64), 3.0), 11.0);
    // A prompt that is cached as a whole takes nothing off what waits.
    assert_eq!(prefill_blocks(160, &prompt(64), 100.0), 10.0);
}

#[test]
fn prediction_is_only_what_goes_beyond_the_credit() {
    assert_eq!(predicted_beyond(3, 5, 10), 0);
    assert_eq!(predicted_beyond(8, 5, 10), 3);
    assert_eq!(predicted_beyond(50, 5, 10), 5);
    assert_eq!(predicted_beyond(50, 0, 0), 0);
}

#[test]
fn a_proven_block_beats_an_expected_one_and_that_beats_none() {
    let prompt = prompt(1024);
    let proven = total(1.0, prefill_blocks(0, &prompt, 10.0), 0.0, 0.0);
    let expected = total(
        1.0,
        prefill_blocks(0, &prompt, 0.0),
        prediction_blocks(10),
        0.0,
    );
    let nothing = total(1.0, prefill_blocks(0, &prompt, 0.0), 0.0, 0.0);
    assert!(proven < expected && expected < nothing);
}

#[test]
fn decode_counts_blocks_that_are_active_already_once() {
    assert_eq!(decode_blocks(100, &prompt(64), 0), 104.0);
    assert_eq!(decode_blocks(100, &prompt(64), 3), 101.0);
    assert_eq!(decode_blocks(100, &prompt(70), 4), 101.0);
    assert_eq!(decode_blocks(100, &prompt(64), 99), 100.0);
}

#[test]
fn the_weight_turns_prefill_only() {
    assert_eq!(total(2.0, 10.0, 1.0, 5.0), 23.0);
    assert_eq!(total(0.0, 10.0, 1.0, 5.0), 5.0);
    assert_eq!(total(1.0, 1.0, 9.0, 5.0), 5.0);
}

/// The worked example of the formula that the field knows.
#[test]
fn the_least_sum_wins_not_the_longest_overlap() {
    let costs = [(8.0, 10.0), (5.0, 5.0), (2.0, 9.0)]
        .map(|(prefill, decode)| total(1.0, prefill, 0.0, decode));
    assert_eq!(costs, [18.0, 10.0, 11.0]);
}

#[test]
fn own_prefill_is_the_prompt_less_what_is_saved() {
    assert_eq!(own_prefill_tokens(&prompt(64), 0.0, 0.0), 64);
    assert_eq!(own_prefill_tokens(&prompt(64), 3.0, 0.0), 16);
    assert_eq!(own_prefill_tokens(&prompt(64), 1.0, 1.8), 20);
    assert_eq!(own_prefill_tokens(&prompt(64), 100.0, 0.0), 0);
}
